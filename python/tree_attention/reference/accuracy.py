# SPDX-License-Identifier: BSD-3-Clause
"""The error of a result against float64, and the bound that makes it right or wrong."""

import hashlib
from collections.abc import Iterator, Sequence
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


class Float64Check:
    """The float64 result of one problem, against which any number of implementations is judged.

    The bounds are `bound_of_o` and `bound_of_lse`. `queries` are indices of those that are
    compared, by default all; `options` are keyword arguments of `lean_decode`.
    """

    # The reference is computed for so many kv heads of one sequence at a time that their float64
    # keys take at most so many bytes, or for one head if its keys alone take more.
    CHUNK_BYTES = 1 << 30

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_ranges: Tensor | None,
        *,
        queries: Sequence[int] | None = None,
        **options: Any,
    ) -> None:
        self._queries = list(range(q.shape[2]) if queries is None else queries)
        parts = [
            (
                *attention(**part),
                attention(**part, dtype=q.dtype)[0],
                attention(**part, dtype=torch.float32)[1],
            )
            for part in self._parts(q, k, v, key_ranges, options)
        ]
        self.o_true, self.lse_true, o_plain, lse_plain = (
            torch.cat([x.flatten(0, 1) for x in results]).unflatten(0, q.shape[:2])
            for results in zip(*parts, strict=True)
        )
        self._o_plain_error = row_error(o_plain, self.o_true)
        self._lse_bound = bound_of_lse(lse_error(lse_plain, self.lse_true))

    def _parts(
        self, q: Tensor, k: Tensor, v: Tensor, key_ranges: Tensor | None, options: dict[str, Any]
    ) -> Iterator[dict[str, Any]]:
        """Arguments of `attention` for some kv heads of one sequence, in the order of the rows."""
        paged = options.get("page_table") is not None
        seqlen_k = options["page_table"].shape[-1] * k.shape[2] if paged else k.shape[2]
        head_bytes = 8 * seqlen_k * max(k.shape[3], v.shape[3])
        step = max(1, self.CHUNK_BYTES // head_bytes) if head_bytes else k.shape[1]
        group_size = q.shape[1] // k.shape[1]
        for b in range(q.shape[0]):
            one = slice(b, b + 1)
            pages = slice(None) if paged else one
            ranges = None if key_ranges is None else key_ranges[one, self._queries]
            for head in range(0, k.shape[1], step):
                heads = slice(head, head + step)
                rows = slice(head * group_size, (head + step) * group_size)
                part = dict(options, q=q[one, rows, self._queries], key_ranges=ranges)
                part |= {"k": k[pages, heads], "v": v[pages, heads]}
                if options.get("alibi_slopes") is not None:
                    part["alibi_slopes"] = options["alibi_slopes"][rows]
                    part["query_positions"] = options["query_positions"][one, self._queries]
                for name in ("k_scale", "v_scale"):
                    if options.get(name) is not None:
                        part[name] = options[name][pages, heads]
                if paged:
                    table = options["page_table"][one]
                    part["page_table"] = table if table.dim() == 2 else table[:, heads]
                yield part

    def accuracy(self, o: Tensor, lse: Tensor | None = None) -> Accuracy:
        """The errors of a result; the error of `lse` counts as 0 where none is given."""
        error = 0.0 if lse is None else lse_error(lse[:, :, self._queries], self.lse_true)
        return Accuracy(
            row_error(o[:, :, self._queries], self.o_true),
            bound_of_o(self._o_plain_error, o.dtype),
            error,
            self._lse_bound,
        )


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
    """The errors of `o` and `lse` against `reference.attention` in float64, see `Float64Check`."""
    return Float64Check(q, k, v, key_ranges, queries=queries, **options).accuracy(o, lse)


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
