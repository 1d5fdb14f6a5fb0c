# SPDX-License-Identifier: BSD-3-Clause
"""Attention to keys in several parts, with one call of `lean_decode` for each part.

If rows share a document, one call attends to the document for all rows, as if they were queries of
one sequence, and another call attends to the keys that each row has for itself.

After a hole of a padding mask, ALiBi counts tokens and not slots: the keys before it are nearer by
its length than their slots say, so they are a call with other positions of the queries.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..cascade import attend_as_one
from ..ops import lean_decode, merge_states
from .masks import KeyRanges


class Part(NamedTuple):
    """Keys that all queries see in one call; the ranges are in these keys."""

    keys: Tensor
    values: Tensor
    ranges: Tensor  # int32 [batch, seqlen_q, (2,) 2]
    options: Mapping[str, Any]  # of lean_decode
    is_common: bool = False  # whether all rows see the keys of one sequence

    def of(self, tokens: slice) -> "Part":
        """The part for some of the queries."""
        options = dict(self.options)
        if "query_positions" in options:
            options["query_positions"] = options["query_positions"][:, tokens]
        return self._replace(ranges=self.ranges[:, tokens], options=options)


def parts_of(
    keys: Tensor, values: Tensor, local: Tensor, options: Mapping[str, Any], ranges: KeyRanges
) -> list[Part]:
    """The parts of some keys; queries see their `local` ranges."""
    if "alibi_slopes" not in options:
        return [Part(keys, values, local, options)]
    positions = ranges.positions
    if ranges.skipped is None:
        return [Part(keys, values, local, {**options, "query_positions": positions})]
    both = (local[:, :, 0], positions - ranges.skipped), (local[:, :, 1], positions)
    return [Part(keys, values, own, {**options, "query_positions": x}) for own, x in both]


def attend_to_parts(
    query: Tensor,
    parts: Sequence[Part],
    out_dtype: torch.dtype,
    result_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """The state of queries `[batch, num_heads_q, seqlen_q, head_dim]` over all parts. It becomes a
    result in `result_dtype` once ranks have merged it, or is one in `out_dtype`."""
    result_dtype = result_dtype or out_dtype
    if len(parts) == 1:
        return _attend(query, parts[0], out_dtype, result_dtype)
    states = (_attend(query, part, torch.float32, result_dtype) for part in parts)
    o, lse = zip(*states, strict=True)
    return merge_states(torch.stack(o), torch.stack(lse), out_dtype=out_dtype)


def _attend(
    query: Tensor, part: Part, out_dtype: torch.dtype, result_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    keys, values, ranges, options, is_common = part
    options = {**options, "out_dtype": out_dtype, "result_dtype": result_dtype}
    if not is_common:
        return lean_decode(query, keys, values, ranges, **options)
    o, lse = attend_as_one(query, keys, values, ranges, options)
    return o, lse
