# SPDX-License-Identifier: BSD-3-Clause
"""The keys and values of one layer with a sliding window that this rank holds."""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .fixed import StaticTreeCacheLayer
from .growing import KVShard, TreeCacheLayer
from .token_split import current_token_split

# The number of tokens that `crop` can always take back: prompt lookup and assisted decoding remove
# the candidates that the model did not choose.
MARGIN = 128
# The number of slots of a page; the buffers are a whole number of pages.
STEP = 64


class WindowLayer(TreeCacheLayer):
    """The keys and values of one layer with a sliding window, in a ring for the last slots.

    A local slot is at the place of its number modulo the size of the buffers, which have room for
    this rank's slots of any `window + MARGIN` tokens, and a page. So a forward pass of up to
    `MARGIN` tokens, and one after a `crop` by as many, find all that their queries see. The queries
    of a longer pass see a copy of these slots with the new tokens, which lives as long as what
    `update` returned. Attention takes the ring for pages, with a table that begins where a
    sequence's window does: one run of slots, wherever the device finds that it is.

    After a hole in a padding mask, queries reach back by the length of the hole in addition. The
    margin has room for this as long as it holds the new tokens and the hole together.
    """

    is_sliding = True
    window: int
    hole = 0  # the length of the longest hole that queries see around, where that is known

    def __init__(self, *args: Any, window: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.window, self.page_size, self.first = window, STEP, 0

    @property
    def first(self) -> int:
        return self.first_kept(self._first, self.length + self.pending)

    @first.setter
    def first(self, first: int) -> None:
        self._first = first
        self._last_pass: WindowLayer | None = None  # what a longer one saw, where that is kept

    @property
    def is_torn(self) -> bool:
        return self._first > 0 and self._first + self.window > self.length

    def in_sight(self) -> tuple[int, int]:
        count = min(self.length, self.window - 1)  # as transformers keeps them
        begin = (self.length - count) % self.key_rows.shape[2]
        return begin, begin + count

    def first_kept(self, first: int, length: int) -> int:
        return max(first, length - self.window - MARGIN) if self.page_size else first

    def capacity(self, num_slots: int) -> int:
        ring = self.shard.most(self.window + MARGIN) + self.page_size - 1
        needed = max(1, min(ring, super().capacity(max(1, num_slots))))
        return -(-needed // self.page_size) * self.page_size

    def places(self, slots: Tensor) -> Tensor:
        return slots.fmod(self.key_rows.shape[2]) if self.page_size else super().places(slots)

    def grow(self, num_slots: int) -> None:
        """Makes a ring of buffers that begin with the local slot `dropped`."""
        super().grow(num_slots)
        if self.dropped:
            self.hold({name: x.roll(self.dropped, 2) for name, x in self.buffers().items()}, 0)

    def make_room_for(self, hole: int, num_slots: int) -> None:
        """Lets queries see around a hole of so many slots, up to a length of the cache, or raises
        NotImplementedError."""
        if hole > MARGIN and num_slots > self.window + MARGIN:
            raise NotImplementedError(
                f"generate: the padding mask of a row has a hole of {hole} slots, and layers with "
                f"a sliding window of {self.window} can see around {MARGIN} at most; give texts "
                "whose lengths differ less, or the whole texts of all rows, padded on the left, "
                "without a cache"
            )
        # If all slots fit into the ring, none of them is gone.
        self.hole = hole if num_slots > self.window + MARGIN else 0

    def check_sees_around(self, first: int) -> None:
        """Raises NotImplementedError if queries after a hole see a slot that is gone."""
        if first < self.first:
            raise NotImplementedError(
                f"tree_attention: after the hole of a padding mask queries see slot {first}, and "
                f"layers with a sliding window of {self.window} keep those from {self.first} on, "
                f"{MARGIN} more than the window for hole and new tokens together: generate from "
                "the cache, which allows for longer holes than a forward pass, or from the whole "
                "texts of all rows, padded on the left, without a cache"
            )

    def operands(self, buffers: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """The ring as `[num_pages, num_heads_kv, page_size, ...]`, a view with strides."""
        size, (batch, num_heads, num_slots, _) = self.page_size, self.key_rows.shape
        if size:
            pages = ((batch - 1) * num_heads + 1) * (num_slots // size), num_heads, size
            buffers = {
                name: x.as_strided((*pages, *x.shape[3:]), (size * x.stride(2), *x.stride()[1:]))
                for name, x in buffers.items()
            }
        return super().operands(buffers)

    def append(self, keys: Tensor, values: Tensor, slots: Tensor, num_tokens: int) -> KVShard:
        self._last_pass = None
        if num_tokens <= MARGIN - self.hole and current_token_split() is None:
            return super().append(keys, values, slots, num_tokens)
        if torch.compiler.is_compiling():
            raise ValueError(
                "TreeCache: where layers have a sliding window, a compiled forward pass takes at "
                f"most {MARGIN - self.hole} tokens, got {num_tokens}; compile that of one token "
                "alone"
            )
        seen, length = copy.copy(self), self.length
        # All slots that are there: if the tokens of a shorter pass are split, `crop` can go back to
        # before their window, and queries after a hole see slots before it.
        seen.page_size = 0
        seen.first = self.first_kept(self._first, length)
        ends = seen.first, length, length + num_tokens
        begin, middle, end = (self.shard.count(slot) for slot in ends)
        before = self.places(torch.arange(begin, middle, device=keys.device))
        seen._reallocate(before, end - begin, begin)
        super(WindowLayer, seen).append(keys, values, slots, num_tokens)
        self._take(seen, length + num_tokens)
        self.first = self.first_kept(seen.first, length + num_tokens)
        self._last_pass = seen if self.keeps_last_pass else None
        seen.number = -1  # it counts the tokens of no other layer
        seen.end(num_tokens)
        return KVShard(seen)  # not a handle that `seen` keeps: its buffers are freed with it

    def _take(self, seen: "WindowLayer", length: int) -> None:
        """Fills the ring with the last of the slots that a pass saw, up to `length`, and leaves it
        torn until the caller says with which slot it begins."""
        self.first = max(length, self.length)
        end = self.shard.count(length)
        begin = max(seen.dropped, end - self.key_rows.shape[2])
        slots = torch.arange(begin, end, device=self.key_rows.device)
        for name, x in self.buffers().items():
            x[:, :, self.places(slots)] = seen.buffers()[name][:, :, seen.places(slots)]

    def check_cut(self, length: int) -> None:
        super(WindowLayer, self._last_pass or self).check_cut(length)

    def cut(self, length: int) -> None:
        seen = self._last_pass
        if seen is None:
            self.first = self.first  # what later tokens have overwritten
            super().cut(length)
        else:
            self._take(seen, length)
            super().cut(length)
            self.first = self.first_kept(seen.first, length)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._last_pass = None  # whose rows stay as they were
        super().reorder_cache(beam_idx)

    batch_select_indices = reorder_cache


class StaticWindowLayer(WindowLayer, StaticTreeCacheLayer):
    """The ring of one layer, whose buffers have their full size from the start."""
