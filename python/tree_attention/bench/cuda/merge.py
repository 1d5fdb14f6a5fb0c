# SPDX-License-Identifier: BSD-3-Clause
"""The rows of `merge_states`: partial states of ranks, merged."""

from typing import Any

import torch
from torch import Tensor

from ... import merge_states
from ...reference import merge_states as true_merge_states
from ..accuracy import Accuracy, row_error
from ..measure import Arena
from .machine import Ceiling
from .peers import OURS
from .rows import measured_row

SECTION, PYTORCH = "merge", "PyTorch"
HEADS, DIM = 32, 128
# (parts, sequences): one token over 8 ranks; a large batch over 8 ranks; many splits.
SHAPES = ((8, 1), (8, 64), (64, 8))


def pytorch_merge(o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    merged = lse.logsumexp(0)
    return ((lse - merged).exp()[..., None] * o).sum(0), merged


def merge_row(
    parts: int, batch: int, arena: Arena, ceiling: Ceiling, *, l2_bytes: int, seconds: float
) -> dict[str, Any]:
    rows = batch * HEADS
    part_bytes = parts * rows * (DIM + 1) * 4
    num_sets = 1 + max(1, -(-2 * l2_bytes // part_bytes))
    generator = torch.Generator(arena.device).manual_seed(0)
    spans, sets = [], []
    for i in range(num_sets):
        span = arena.view(i, (part_bytes,), torch.uint8)
        o, lse = span.view(torch.float32).split((parts * rows * DIM, parts * rows))
        spans.append(span)
        sets.append((o.view(parts, rows, DIM), lse.view(parts, rows)))
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
        io_bytes=part_bytes + rows * (DIM + 1) * 4,
        ceiling=ceiling,
        seconds=seconds,
    )
    name = f"merge_states {parts} parts B={batch} {HEADS} heads d{DIM} fp32"
    return {"name": name, "section": SECTION, **row}
