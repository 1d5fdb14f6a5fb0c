# SPDX-License-Identifier: BSD-3-Clause
"""The error of a result against float64, and the bound that makes it right or wrong."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .attention import attention


@dataclass(frozen=True)
class Accuracy:
    """The largest errors of a result over all its rows, and the bounds they must not exceed."""

    o_error: float  # of an element, relative to the largest magnitude of its row
    o_bound: float
    lse_error: float  # relative to max(1, |lse|)
    lse_bound: float

    @property
    def right(self) -> bool:
        # A NaN error makes both comparisons false, and so the result wrong.
        return self.o_error <= self.o_bound and self.lse_error <= self.lse_bound


def check_against_float64(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_ranges: Tensor | None,
    o: Tensor,
    lse: Tensor,
    **options: Any,
) -> Accuracy:
    """The errors of `o` and `lse`, the result of `lean_decode` with these arguments and `options`,
    against `reference.attention` in float64."""
    arguments = (q, k, v, key_ranges)
    o_true, lse_true = attention(*arguments, **options)
    o_plain, _ = attention(*arguments, **options, dtype=q.dtype)
    _, lse_plain = attention(*arguments, **options, dtype=torch.float32)
    return Accuracy(
        row_error(o, o_true),
        bound_of_o(row_error(o_plain, o_true), o.dtype),
        lse_error(lse, lse_true),
        bound_of_lse(lse_error(lse_plain, lse_true)),
    )


def bound_of_o(plain_error: float, dtype: torch.dtype) -> float:
    """Twice the error of plain PyTorch, which had q's dtype, plus one rounding to o's `dtype`."""
    return 2 * plain_error + torch.finfo(dtype).eps


def bound_of_lse(plain_error: float) -> float:
    """Twice the error of plain PyTorch in float32, plus four roundings."""
    return 2 * plain_error + 4 * torch.finfo(torch.float32).eps


def digest(tensors: Sequence[Tensor]) -> str:
    """The SHA-256 digest of the bytes of all tensors, for ranks to compare their results' bits."""
    sha = hashlib.sha256()
    for tensor in tensors:
        sha.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def row_error(o: Tensor, o_true: Tensor) -> float:
    """The largest error of an element relative to the largest magnitude of its row."""
    largest = o_true.abs().amax(-1).clamp(min=torch.finfo(torch.float64).tiny)
    return ((o.double() - o_true).abs().amax(-1) / largest).max().item()


def lse_error(lse: Tensor, lse_true: Tensor) -> float:
    """The largest error relative to `max(1, |lse|)`."""
    same = lse.double() == lse_true  # also two empty rows, whose difference would be NaN
    error = (lse.double() - lse_true).abs() / lse_true.abs().clamp(min=1.0)
    return torch.where(same, 0.0, error).max().item()
