# SPDX-License-Identifier: BSD-3-Clause
"""The error of a result against float64, and the bound that makes it right or wrong."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..reference import attention


@dataclass(frozen=True)
class Accuracy:
    """Largest errors over all rows; of `o` relative to the largest magnitude of the row."""

    o_error: float
    o_bound: float
    lse_error: float  # relative to max(1, |lse|)
    lse_bound: float

    @property
    def right(self) -> bool:
        # In this form a NaN is wrong.
        return self.o_error <= self.o_bound and self.lse_error <= self.lse_bound


def check_against_float64(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_ranges: Tensor | None,
    o: Tensor,
    lse: Tensor,
    *,
    queries: Sequence[int] | None = None,
    **options: Any,
) -> Accuracy:
    """Compares `o` and `lse` with `reference.attention` in float64.

    The bounds: of `o` twice the error of plain PyTorch in q's dtype plus one rounding of o's
    dtype, of `lse` twice the error of plain float32 PyTorch plus four roundings. `queries` limits
    the comparison to some of the queries; `options` are `lean_decode`'s. One kv head at a time,
    which bounds the memory of the float64 copies.
    """
    indices = torch.arange(q.shape[2]) if queries is None else torch.tensor(queries)
    ranges = None if key_ranges is None else key_ranges[:, indices]
    group_size = q.shape[1] // k.shape[1]
    slopes = options.get("alibi_slopes")
    o_error = o_plain_error = lse_error = lse_plain_error = 0.0
    for head in range(k.shape[1]):
        rows = slice(head * group_size, (head + 1) * group_size)
        inputs = q[:, rows, indices], k[:, head : head + 1], v[:, head : head + 1], ranges
        if slopes is not None:
            options["alibi_slopes"] = slopes[rows]
        o_true, lse_true = attention(*inputs, **options)
        _, lse_plain = attention(*inputs, **options, dtype=torch.float32)
        o_plain, _ = attention(*inputs, **options, dtype=q.dtype)
        o_error = _max(o_error, _row_error(o[:, rows, indices], o_true))
        o_plain_error = _max(o_plain_error, _row_error(o_plain, o_true))
        lse_error = _max(lse_error, _lse_error(lse[:, rows, indices], lse_true))
        lse_plain_error = _max(lse_plain_error, _lse_error(lse_plain, lse_true))
    return Accuracy(
        o_error,
        2 * o_plain_error + torch.finfo(o.dtype).eps,
        lse_error,
        2 * lse_plain_error + 4 * torch.finfo(torch.float32).eps,
    )


def digest(tensors: Sequence[Tensor]) -> str:
    """Of the bytes of all tensors: equal on two ranks when these hold the same bits."""
    sha = hashlib.sha256()
    for tensor in tensors:
        sha.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def _max(a: float, b: float) -> float:
    """max() that keeps a NaN, which Python's drops or keeps by operand order."""
    return b if b != b or b > a else a


def _row_error(o: Tensor, o_true: Tensor) -> float:
    largest = o_true.abs().amax(-1).clamp(min=torch.finfo(torch.float64).tiny)
    return ((o.double() - o_true).abs().amax(-1) / largest).max().item()


def _lse_error(lse: Tensor, lse_true: Tensor) -> float:
    same = lse.double() == lse_true  # also two empty rows, whose difference would be NaN
    error = (lse.double() - lse_true).abs() / lse_true.abs().clamp(min=1.0)
    return torch.where(same, 0.0, error).max().item()
