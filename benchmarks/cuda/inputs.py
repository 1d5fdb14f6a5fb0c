# SPDX-License-Identifier: BSD-3-Clause
"""A case's tensors: one q, and as many sets of K and V as it takes to find the L2 cache cold."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..harness.measure import InputArena
from ..harness.shapes import DTYPES
from .cases import CudaCase

# Kept out of the arena: outputs, workspaces, and the float64 copies of one head of a million keys.
SPARE_BYTES = 10 << 30
# The value of keys and values that no query may see. It is finite, because kernels that multiply
# masked values by zero are right too, and so large that one of them in a sum shows.
UNSEEN = 3e4
# Keys and values of 8 bits stand for this many times less, times a factor of each token's own.
EIGHT_BIT_STEPS = 32


def num_sets(read_bytes: int, l2_bytes: int) -> int:
    """Sets to rotate over so that twice the L2 is read before a set is visited again.

    One alone does where what a call leaves in the cache is at most 3 % of what it reads.
    """
    if read_bytes >= 32 * l2_bytes:
        return 1
    return 1 + max(1, math.ceil(2 * l2_bytes / read_bytes))


@dataclass(frozen=True)
class KeyValues:
    """One set. `k` and `v` are what `lean_decode` takes; `k_memory`, `v_memory` the tensors that
    they are views of, in the order of axes of the case's layout; `scales` those of 8 bits, by the
    names of their arguments; `span` all bytes of these."""

    k: Tensor
    v: Tensor
    k_memory: Tensor
    v_memory: Tensor
    span: Tensor
    scales: Mapping[str, Tensor] = field(default_factory=dict)


class Inputs:
    """All sets hold the same values."""

    def __init__(self, case: CudaCase, arena: InputArena, sets: int) -> None:
        self.case = case
        self.device = arena.device
        self._generator = torch.Generator(arena.device).manual_seed(0)
        dtype = DTYPES[case.dtype]
        # Scores with a standard deviation of 3: a few keys dominate, many still count.
        self.q = 3.0 * self._normal(case.batch, case.heads[0], case.seqlen_q, case.head_dim)
        self.q = self.q.to(dtype)
        self.page_table = self._page_table() if case.page_size else None
        self.sets = [self._set(arena.view(i, (case.set_bytes,), torch.uint8)) for i in range(sets)]
        first = self.sets[0]
        self._fill(first)
        self._cover_unseen(first)
        for other in self.sets[1:]:
            other.span.copy_(first.span)

    def _set(self, span: Tensor) -> KeyValues:
        case = self.case
        if case.latent_dim:
            k_memory = span.view(case.cached_dtype).view(case.tensor_shape)
            v_memory = k_memory[..., : case.latent_dim]
            k, v = self._heads_first(k_memory), self._heads_first(v_memory)
            return KeyValues(k, v, k_memory, v_memory, span)
        num_elements = math.prod(case.tensor_shape)
        num_bytes = num_elements * case.cached_dtype.itemsize
        k_memory, v_memory = (
            part.view(case.cached_dtype).view(case.tensor_shape)
            for part in span[: 2 * num_bytes].chunk(2)
        )
        scales = {
            name: self._heads_first(part.view(torch.float32).view(*case.tensor_shape[:-1], 1))[
                ..., 0
            ]
            for name, part in zip(
                ("k_scale", "v_scale"), span[2 * num_bytes :].chunk(2), strict=False
            )
            if case.kv_dtype
        }
        k, v = self._heads_first(k_memory), self._heads_first(v_memory)
        return KeyValues(k, v, k_memory, v_memory, span, scales)

    def _fill(self, kv: KeyValues) -> None:
        for memory in [kv.k_memory] if self.case.latent_dim else [kv.k_memory, kv.v_memory]:
            if self.case.kv_dtype:
                normal = self._normal(*memory.shape).mul_(EIGHT_BIT_STEPS)
                memory.copy_(normal.clamp_(-127, 127))
            else:
                memory.normal_(generator=self._generator)
        for scale in kv.scales.values():
            scale.uniform_(0.5 / EIGHT_BIT_STEPS, 1.5 / EIGHT_BIT_STEPS, generator=self._generator)

    def options(self, i: int) -> dict[str, Any]:
        """The keyword arguments with which `lean_decode` takes the i-th set."""
        return {"page_table": self.page_table, **self.sets[i].scales}

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator, device=self.device)

    def _page_table(self) -> Tensor:
        """Pages in random order."""
        case = self.case
        pages = torch.randperm(
            case.batch * case.num_pages, generator=self._generator, device=self.device
        )
        return pages.int().view(case.batch, case.num_pages)

    def _heads_first(self, memory: Tensor) -> Tensor:
        """The view `[batch or pages, heads, slots, dim]`."""
        case = self.case
        if case.layout == "packed":
            heads, dim = memory.shape[1:]
            step = heads * dim
            # Sequences overlap beyond their ranges: each begins where the one before ends.
            return memory.as_strided(
                (case.batch, heads, case.slots, dim), (case.lengths[0] * step, dim, step, 1)
            )
        return memory.transpose(1, 2) if case.layout == "NHD" or case.page_size else memory

    def _cover_unseen(self, kv: KeyValues) -> None:
        case = self.case
        if case.layout == "packed":
            return  # what lies beyond a sequence is another sequence
        for b, length in enumerate(case.lengths):
            # Far beyond the end nothing is written: filling it would take longer than the row.
            for begin, end in ((0, case.first_key(length)), (length, length + 4096)):
                for x in kv.scales.values() if case.kv_dtype else (kv.k, kv.v):
                    if self.page_table is None:
                        x[b, :, begin:end] = UNSEEN
                    else:
                        end = min(end, case.num_pages * case.page_size)
                        slots = torch.arange(begin, end, device=self.device)
                        pages = self.page_table[b, slots // case.page_size].long()
                        x[pages, :, slots % case.page_size] = UNSEEN

    @cached_property
    def lengths(self) -> Tensor:
        return torch.tensor(self.case.lengths, dtype=torch.int32, device=self.device)

    @cached_property
    def key_ranges(self) -> Tensor:
        """The range of keys of every query, also where that is all keys."""
        case = self.case
        ends = torch.tensor(case.lengths)[:, None] - torch.arange(case.seqlen_q - 1, -1, -1)
        begins = (ends - case.window).clamp(min=0) if case.window else torch.zeros_like(ends)
        return torch.stack([begins, ends], dim=-1).int().to(self.device)

    @cached_property
    def all_keys(self) -> bool:
        """Every query sees every slot."""
        case = self.case
        return case.seqlen_q == 1 and not case.lengths_on_device and not case.window
