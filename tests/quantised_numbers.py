# SPDX-License-Identifier: BSD-3-Clause
"""The numbers that quantised weights stand for, computed one by one."""

from __future__ import annotations

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Of the largest number of a product, by the dtype that it is rounded to.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def numbers_of(weight: Tensor, scheme: str, dtype: torch.dtype) -> Tensor:
    """Return what a weight `[outputs, inputs]` stands for, row by row and number by number."""
    size = weight.shape[1] if scheme == "int8" else 128
    parts = []
    for group in weight.float().split(size, dim=1):
        rows = []
        for row in group:
            largest = row[row.abs().argmax()]
            scale = (largest.abs() / 127 if scheme == "int8" else largest / -8).to(dtype).float()
            low, high = (-127, 127) if scheme == "int8" else (-8, 7)
            divisor = scale if scale != 0 else torch.tensor(1.0)
            rows.append((row / divisor).round().clamp(low, high) * scale)
        parts.append(torch.stack(rows))
    return torch.cat(parts, dim=1)
