# SPDX-License-Identifier: BSD-3-Clause
"""The yardstick of results that are too large for `check_against_float64`: part by part, once."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from tree_attention.reference import attention
from tree_attention.reference.accuracy import (
    Accuracy,
    bound_of_lse,
    bound_of_o,
    lse_error,
    row_error,
)


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
