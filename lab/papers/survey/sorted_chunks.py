# SPDX-License-Identifier: BSD-3-Clause
"""Reformer's attention in sorted chunks (arXiv:2001.04451, section 2): ranges, and no matrix.

Sorted by bucket and position, a bucket is a range of keys. What a query sees of it, in its chunk
and the one before, is a range too, or two where it leaves itself out, and `lean_decode` reads no
other keys. The rounds are merged as shards are; `lab.papers.lsh` is the definition by a
matrix. A key that several rounds find counts as often here: what lowers its score differs by query
and key, which ranges cannot say.
"""

import torch
from torch import Tensor

from . import REFERENCE, Operators
from .routing import sorted_ranges


def chunk_ranges(buckets: Tensor, chunk: int, *, causal: bool = False) -> tuple[Tensor, Tensor]:
    """The order of one round, and the two ranges of sorted keys of each sorted query.

    Args:
        buckets: `[seqlen]`.

    Returns:
        order: `[seqlen]`.
        ranges: int32 `[seqlen, 2, 2]`: before the query itself and behind it. A query that sees no
            other key sees itself.
    """
    order, bounds = sorted_ranges(buckets, buckets)
    begin, end = bounds[order].unbind(-1)
    itself = torch.arange(len(order), dtype=torch.int32)
    begin = torch.maximum(begin, (itself // chunk - 1) * chunk)
    end = torch.minimum(end, (itself // chunk + 1) * chunk)
    if causal:
        end = torch.minimum(end, itself + 1)
    alone = (begin == itself) & (end == itself + 1)
    before = torch.stack([begin, itself + alone.int()], dim=-1)
    return order, torch.stack([before, torch.stack([itself + 1, end], dim=-1)], dim=1)


def sorted_lsh_attention(
    x: Tensor,
    v: Tensor,
    buckets: Tensor,
    chunk: int,
    *,
    causal: bool = False,
    operators: Operators = REFERENCE,
) -> tuple[Tensor, Tensor]:
    """o and lse of one head in rounds.

    Args:
        x: `[seqlen, head_dim]`, the queries; the keys are these vectors with length 1.
        v: `[seqlen, head_dim_v]`.
        buckets: `[rounds, seqlen]`, as from `lsh.hash_rounds`.
    """
    keys = torch.nn.functional.normalize(x, dim=-1)
    states = []
    for of_round in buckets:
        order, ranges = chunk_ranges(of_round, chunk, causal=causal)
        rows = (one[order][None, None] for one in (x, keys, v))
        o, lse = operators.attend(*rows, ranges[None])
        back = order.argsort()
        states.append((o[0, 0, back], lse[0, 0, back]))
    o_parts, lse_parts = (torch.stack(parts) for parts in zip(*states, strict=True))
    return operators.merge(o_parts, lse_parts)
