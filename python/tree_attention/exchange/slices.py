# SPDX-License-Identifier: BSD-3-Clause
"""Dealing a state to ranks: each merges a slice of it, and gives back or keeps the result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .state import Message


@dataclass(frozen=True)
class Slices:
    """A state in equal slices, one per rank of some: runs of rows, or of heads.

    Slice i holds `[i * size, (i + 1) * size)` of `count` rows or heads, as `torch.chunk` deals
    them: the last slices may be shorter or empty, and are padded.
    """

    message: Message  # of one padded slice, its shape [batch, size, ...]
    num_slices: int
    count: int

    @staticmethod
    def of_rows(message: Message, num_slices: int) -> Slices:
        count = message.num_rows
        size = -(-count // num_slices)
        return Slices(replace(message, shape=(1, size)), num_slices, count)

    @staticmethod
    def of_heads(message: Message, num_slices: int) -> Slices:
        batch, count, *rest = message.shape
        size = -(-count // num_slices)
        return Slices(replace(message, shape=(batch, size, *rest)), num_slices, count)

    @property
    def size(self) -> int:
        return self.message.shape[1]

    @property
    def num_bytes(self) -> int:
        """Of all slices as messages."""
        return self.num_slices * self.message.num_bytes

    def to(self, dtype: torch.dtype) -> Slices:
        """Of the same state with another dtype of o."""
        return replace(self, message=replace(self.message, dtype=dtype))

    def count_in(self, index: int) -> int:
        """Rows or heads of slice `index`, without padding."""
        return min(max(self.count - index * self.size, 0), self.size)

    def messages(self, memory: Tensor) -> Tensor:
        return memory.view(self.num_slices, self.message.num_bytes)

    def pairs(self, messages: Tensor, state: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Equal views `(of the slices, of the state (o, lse))`, which together cover the state."""
        result = []
        for parts, whole in zip(self.message.views(messages), state, strict=True):
            # [batch, count, ...]; rows of all batches and heads are one run.
            leading = self.message.shape[0], self.count, *parts.shape[3:]
            whole = whole.view(leading)
            num_full, rest = divmod(self.count, self.size)
            if num_full:
                full = whole[:, : self.count - rest].unflatten(1, (num_full, self.size))
                result.append((parts[:num_full].transpose(0, 1), full))
            if rest:
                result.append((parts[num_full, :, :rest], whole[:, self.count - rest :]))
        return result
