# SPDX-License-Identifier: BSD-3-Clause
"""The rows of `merge_states`: partial states of ranks, merged."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tree_attention import merge_states
from tree_attention.reference import merge_states as true_merge_states
from tree_attention.reference.accuracy import Accuracy, row_error

from ..harness.measure import InputArena
from .cases import OURS
from .machine import Ceiling
from .rows import measured_row

SECTION, PYTORCH = "merge", "PyTorch"
HEADS, DIM = 32, 128


@dataclass(frozen=True)
class MergeCase:
    """The states of one token of every sequence, in float32."""

    parts: int
    batch: int

    @property
    def name(self) -> str:
        return f"merge_states {self.parts} parts B={self.batch} {HEADS} heads d{DIM} fp32"

    @property
    def rows(self) -> int:
        return self.batch * HEADS

    @property
    def set_bytes(self) -> int:
        return self.parts * self.rows * (DIM + 1) * 4

    @property
    def read_bytes(self) -> int:
        return self.set_bytes


# Eight ranks with one token and with a large batch; many splits.
CASES = (MergeCase(8, 1), MergeCase(8, 64), MergeCase(64, 8))


def pytorch_merge(o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    merged = lse.logsumexp(0)
    return ((lse - merged).exp()[..., None] * o).sum(0), merged


def merge_row(
    case: MergeCase, arena: InputArena, num_sets: int, ceiling: Ceiling, seconds: float
) -> dict[str, Any]:
    generator = torch.Generator(arena.device).manual_seed(0)
    spans, sets = [], []
    for i in range(num_sets):
        span = arena.view(i, (case.set_bytes,), torch.uint8)
        shape = (case.parts, case.rows, DIM)
        o, lse = span.view(torch.float32).split((math.prod(shape), case.parts * case.rows))
        spans.append(span)
        sets.append((o.view(shape), lse.view(shape[:2])))
    for x in sets[0]:
        x.normal_(generator=generator)
    for other in spans[1:]:
        other.copy_(spans[0])
    o_true, lse_true = true_merge_states(*sets[0])

    def judge(o: Tensor, lse: Tensor | None = None) -> Accuracy:
        bound = 16 * torch.finfo(torch.float32).eps
        error = 0.0 if lse is None else (lse.double() - lse_true).abs().max().item()
        return Accuracy(row_error(o, o_true), bound, error, bound)

    row = measured_row(
        {
            OURS: lambda i: merge_states(*sets[i]),
            PYTORCH: lambda i: pytorch_merge(*sets[i]),
        },
        {},
        spans,
        judge=judge,
        io_bytes=case.set_bytes + case.rows * (DIM + 1) * 4,
        ceiling=ceiling,
        seconds=seconds,
    )
    return {"name": case.name, "section": SECTION, **row}
