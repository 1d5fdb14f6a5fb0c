# SPDX-License-Identifier: BSD-3-Clause
"""The keys and values of one layer with a sliding window that this rank holds."""

import copy
from typing import Any

import torch
from torch import Tensor

from .growing import KVShard, TreeCacheLayer
from .shard import Shard

# The number of tokens that `crop` can always take back: prompt lookup and assisted decoding remove
# the candidates that the model did not choose.
MARGIN = 128
# Buffers end at a local slot that is a multiple of it. Every so many the window moves to new ones,
# which is 2 * (window + MARGIN) / (STEP * window) of what attention reads in the meantime. With
# blocks of as many slots, the window has moved on by as many until the next one begins.
STEP = 64


class WindowLayer(TreeCacheLayer):
    """The keys and values of one layer with a sliding window that this rank holds.

    Between forward passes the buffers have room for this rank's slots of the last `window +
    MARGIN` tokens, or of the window and a longer last pass, and `STEP` more. A chunk's queries
    may see slots that are forgotten after it: those are in buffers that live as long as what
    `update` returned. Compiled graphs forget nothing, as each case would be a graph of its own;
    the next forward pass that is none does.
    """

    is_sliding = True
    window: int
    keeps_last_pass = False  # for assisted decoding, which takes back all candidates of a pass

    def __init__(
        self, shard: Shard, growth: int, window: int, kv_dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(shard, growth, kv_dtype)
        self.window = window

    def update(  # type: ignore[override]
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[KVShard, KVShard]:
        length = self.length
        handles = super().update(key_states, value_states, *args, **kwargs)
        if torch.compiler.is_compiling():
            return handles
        margin = max(MARGIN, self.length - length) if self.keeps_last_pass else MARGIN
        self.first = max(self.first, self.length - self.window - margin)
        held = self.held()
        if self.keys.shape[2] > held.stop - held.start + STEP:
            # Not a handle that `seen` keeps: without a cycle its buffers are freed with the handle.
            seen = copy.copy(self)
            handles = KVShard(seen), KVShard(seen)
            self._move(self.shard.count(self.length))
        return handles

    def capacity(self, num_slots: int) -> int:
        step = self.growth if torch.compiler.is_compiling() else min(self.growth, STEP)
        return -(-num_slots // step) * step

    def check_cut(self, length: int) -> None:
        if self.first > 0 and length < self.first + self.window:
            raise ValueError(
                f"TreeCache: crop can remove {self.length - self.first - self.window} of these "
                f"{self.length} tokens, got {self.length - length}: layers with a sliding window "
                f"of {self.window} have forgotten the slots before {self.first}; copy.deepcopy the "
                "cache where it must go back further, or forget all tokens with reset"
            )

    def reserve(self, length: int) -> None:
        """Does nothing, as the buffers hold little more than the window."""

    def grow(self, num_slots: int) -> None:
        self._move(self.capacity(num_slots))

    def _move(self, end: int) -> None:
        """Moves the slots from `first` on to the beginning of buffers that end at a local slot."""
        held = self.held()
        dropped = self.dropped + held.start
        self._reallocate(held, end - dropped, dropped)
