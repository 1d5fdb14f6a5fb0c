# SPDX-License-Identifier: BSD-3-Clause
"""Choices of keys by the scores of an index, and their merge, one row at a time."""

import math

import torch
from torch import Tensor


def index_topk(
    q: Tensor,
    k: Tensor,
    weights: Tensor | None = None,
    key_ranges: Tensor | None = None,
    *,
    topk: int,
    scale: float = 1.0,
    block: int = 1,
    local_blocks: int = 0,
    key_slots: Tensor | None = None,
    query_positions: Tensor | None = None,
    page_table: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute `tree_attention.index_topk` one query at a time, with the same arguments.

    Returns:
        float64 scores and int32 slots `[batch, 1 or num_heads, seqlen_q, topk]`.

    For example::

        import torch
        from tree_attention.reference import index_topk

        q, k = torch.randn(1, 8, 1, 32), torch.randn(1, 1, 100, 32)  # 8 heads of an index
        scores, slots = index_topk(q, k, torch.rand(1, 8, 1), topk=4)
        print(scores.dtype, slots.shape)  # torch.float64 torch.Size([1, 1, 1, 4])
    """
    batch, num_heads, seqlen_q, _ = q.shape
    if page_table is not None:
        k = torch.stack([k[pages.long(), 0].flatten(0, 1) for pages in page_table])[:, None]
    seqlen_k = k.shape[2]
    slots_of = torch.arange(seqlen_k) if key_slots is None else key_slots.long()
    shape = (batch, num_heads if weights is None else 1, seqlen_q, topk)
    scores = torch.full(shape, -math.inf, dtype=torch.float64)
    slots = torch.full(shape, -1, dtype=torch.int32)
    for b in range(batch):
        for t in range(seqlen_q):
            begin, end = (0, seqlen_k) if key_ranges is None else key_ranges[b, t].tolist()
            visible = slice(max(begin, 0), max(end, 0))
            of_keys = scale * q[b, :, t].double() @ k[b, 0, visible].double().mT
            if weights is not None:
                of_keys = (weights[b, :, t].double()[:, None] * of_keys.relu()).sum(0, keepdim=True)
            local = []
            if local_blocks:
                assert query_positions is not None
                own = int(query_positions[b, t]) // block
                local = list(range(max(0, own - local_blocks + 1), own + 1))
            for row, row_scores in enumerate(of_keys):
                named = slots_of[visible] // block
                is_other = ~torch.isin(named, torch.tensor(local, dtype=torch.int64))
                entries = (
                    torch.cat([row_scores[is_other], torch.full((len(local),), math.inf).double()]),
                    torch.cat([named[is_other], torch.tensor(local, dtype=torch.int64)]),
                )
                scores[b, row, t], slots[b, row, t] = _first(*entries, topk)
    return scores, slots


def merge_topk(scores: Tensor, slots: Tensor, *, topk: int) -> tuple[Tensor, Tensor]:
    """The first topk of the union of parts `[n, ..., k]`, in the total order: NaN first, then score
    down, slot up, where a slot that is named twice has its largest score.

    For example::

        import torch
        from tree_attention.reference import merge_topk

        scores = torch.tensor([[3.0, 1.0], [2.0, 1.0]])  # of two ranks
        slots = torch.tensor([[7, 9], [4, 5]], dtype=torch.int32)
        print(merge_topk(scores, slots, topk=3)[1].tolist())  # [7, 4, 5]
    """
    num_rows = math.prod(scores.shape[1:-1])
    rows = zip(
        scores.movedim(0, -2).reshape(num_rows, scores.shape[0] * scores.shape[-1]),
        slots.movedim(0, -2).reshape(num_rows, scores.shape[0] * scores.shape[-1]),
        strict=True,
    )
    merged = [_first(s[n >= 0], n[n >= 0], topk) for s, n in rows]
    shape = (*scores.shape[1:-1], topk)
    if not merged:
        return scores.new_empty(shape), slots.new_empty(shape)
    return (
        torch.stack([s for s, _ in merged]).view(shape),
        torch.stack([n for _, n in merged]).int().view(shape),
    )


def _first(scores: Tensor, slots: Tensor, topk: int) -> tuple[Tensor, Tensor]:
    """The first topk entries of one row."""
    # -0 becomes 0. Sorting is stable, so that the last sort is what counts most.
    scores, slots = scores + 0.0, slots.long()
    order = slots.sort(stable=True).indices
    order = order[scores[order].sort(descending=True, stable=True).indices]
    order = order[scores[order].isnan().logical_not().sort(stable=True).indices]
    kept: list[int] = []
    named: set[int] = set()
    for i in order.tolist():
        if len(kept) < topk and int(slots[i]) not in named:
            kept.append(i)
            named.add(int(slots[i]))
    first_scores = scores.new_full((topk,), -math.inf)
    first_slots = slots.new_full((topk,), -1)
    first_scores[: len(kept)], first_slots[: len(kept)] = scores[kept], slots[kept]
    return first_scores, first_slots
