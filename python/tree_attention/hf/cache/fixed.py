# SPDX-License-Identifier: BSD-3-Clause
"""The layers of a cache of fixed size: in a decoding step, the host neither waits nor chooses."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...ops import append_kv
from ..prompts.token_split import current_deal
from .growing import KVShard, TreeCacheLayer, interrupted
from .latent import LatentLayer
from .shard import Shard


class Progress:
    """The number of slots in use, in tensors on the device; one object for all layers.

    The first layer finds the slots of the new tokens, and the last one counts the tokens: what a
    forward pass that was interrupted has written is not in use.
    """

    def __init__(self, max_length: int) -> None:
        self.max_length = max_length
        # int64 [], of the sequence, on all ranks together; None before there are buffers.
        self.length: Tensor | None = None
        # int64 [batch, tokens], the local slots of the new tokens, -1 for those of other ranks;
        # None between forward passes.
        self.slots: Tensor | None = None

    def place(self, device: torch.device) -> None:
        """Moves the length to `device`."""
        if self.length is None or self.length.device != device:
            self.length = _static(torch.tensor(self.read(), dtype=torch.int64, device=device))

    def read(self) -> int:
        """The length as a number, for which the host waits."""
        length = 0 if self.length is None else int(self.length)
        self.check(length)
        return length

    def write(self, length: int) -> None:
        """Sets the length, and forgets a forward pass that was interrupted."""
        self.slots = None
        if self.length is not None:
            self.length.fill_(length)

    def check(self, length: int) -> None:
        if length > self.max_length:
            raise ValueError(
                f"TreeCache: the cache has max_length {self.max_length}, and cannot hold "
                f"{length} tokens; make it larger"
            )

    def begin(self, shard: Shard, batch: int, num_tokens: int) -> None:
        """Finds the slots of new tokens; ValueError if there are too many."""
        # The host asks for their number only where it need not wait, or has a prompt. Otherwise a
        # token beyond `max_length` gets a slot that no buffer has, on every rank: `append_kv`
        # refuses it on the CPU and drops it on CUDA, where `read` says so later.
        assert self.length is not None
        device = self.length.device
        if self.slots is not None:
            raise interrupted()
        if not torch.compiler.is_compiling() and (device.type == "cpu" or num_tokens > 1):
            self.check(int(self.length) + num_tokens)
        slots = torch.arange(num_tokens, device=device) + self.length
        if shard.world_size > 1:
            local = shard.layout.local_slots_of(shard.rank, slots)
            slots = torch.where(slots < self.max_length, local, shard.count(self.max_length))
        self.slots = slots.expand(batch, -1)

    def end(self, num_tokens: int) -> None:
        assert self.length is not None
        self.length.add_(num_tokens)
        self.slots = None


class StaticTreeCacheLayer(TreeCacheLayer):
    """The keys and values of one layer that this rank holds, in buffers for `max_length` tokens."""

    is_compileable = True

    def __init__(
        self,
        shard: Shard,
        progress: Progress,
        kv_dtype: torch.dtype | None,
        *,
        is_first: bool,
        is_last: bool,
    ) -> None:
        self.progress = progress
        super().__init__(shard, growth=1, kv_dtype=kv_dtype)
        self.is_first, self.is_last = is_first, is_last

    @property
    def length(self) -> int:
        """The number of tokens, for which the host waits: nothing in a decoding step asks."""
        return self.progress.read()

    @length.setter
    def length(self, length: int) -> None:
        self.progress.write(length)

    @property
    def is_interrupted(self) -> bool:
        return self.progress.slots is not None

    @property
    def kv_length(self) -> int:
        return self.progress.max_length

    def capacity(self, num_slots: int) -> int:
        return self.shard.count(self.progress.max_length)

    def grow(self, num_slots: int) -> None:
        """Makes buffers for all slots, without asking how many are in use: none."""
        self._reallocate(slice(0, 0), self.capacity(num_slots), self.dropped)

    def hold(self, buffers: Mapping[str, Tensor], dropped: int) -> None:
        self.progress.place(buffers["keys"].device)
        super().hold({name: _static(x) for name, x in buffers.items()}, dropped)

    def update(  # type: ignore[override]
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[KVShard, KVShard]:
        self._prepare(key_states, value_states)
        keys, values = key_states.detach(), value_states.detach()
        progress, deal = self.progress, current_deal()
        if deal is None:
            num_tokens = keys.shape[2]
            if self.is_first:
                progress.begin(self.shard, len(keys), num_tokens)
            slots = progress.slots
            assert slots is not None, "the first layer comes first"
        else:
            num_tokens = deal.length
            progress.check(deal.end)
            slots = self.shard.write(deal.begin, deal.end, keys.device).slots.expand(len(keys), -1)
            keys, values = deal.rows_of_owner(keys, values)
        append_kv(keys, values, self.keys, self.values, slots, **self.scales())
        if self.is_last:
            progress.end(num_tokens)
        return self.handle, self.handle

    def get_seq_length(self) -> Tensor | int:  # type: ignore[override]
        length = self.progress.length
        return 0 if length is None else length.clone()  # that of the cache goes on

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.progress.max_length, 0

    def get_max_length(self) -> int:
        return self.progress.max_length

    get_max_cache_shape = get_max_length  # its name before transformers 5.17

    def cut(self, length: int) -> None:
        if self.is_last:  # the length is that of all layers
            super().cut(length)


class StaticLatentLayer(LatentLayer, StaticTreeCacheLayer):
    """The latents of one layer that this rank holds, in buffers for `max_length` tokens."""


def _static(x: Tensor) -> Tensor:
    """Tells CUDA graphs that the tensor stays where it is, so that they write to it in place."""
    if not torch.compiler.is_compiling():
        torch._dynamo.mark_static_address(x, guard=False)
    return x
