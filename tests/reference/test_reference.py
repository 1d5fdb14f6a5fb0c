# SPDX-License-Identifier: BSD-3-Clause
"""The float64 reference against formulas written another way, to 1e-12."""

import math
from itertools import pairwise

import pytest
import torch
from torch.testing import assert_close

from tree_attention.reference import attention, merge, merge_states

EXACT = {"rtol": 1e-12, "atol": 1e-12}


def dense(q, k, v, mask, scale, bias=0.0, softcap=0.0):
    """All scores at once; `mask [batch, 1, seqlen_q, seqlen_k]` is true where a key is seen."""
    group_size = q.shape[1] // k.shape[1]
    scores = scale * q @ k.repeat_interleave(group_size, 1).mT
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = (scores + bias).masked_fill(~mask, -math.inf)
    lse = torch.logsumexp(scores, -1)
    return scores.softmax(-1).nan_to_num(0) @ v.repeat_interleave(group_size, 1), lse


def inputs(batch=2, num_heads_q=6, num_heads_kv=2, seqlen_q=4, seqlen_k=19, head_dim=8, dim_v=5):
    q = torch.randn(batch, num_heads_q, seqlen_q, head_dim, dtype=torch.float64)
    k = torch.randn(batch, num_heads_kv, seqlen_k, head_dim, dtype=torch.float64)
    v = torch.randn(batch, num_heads_kv, seqlen_k, dim_v, dtype=torch.float64)
    return q, k, v


RANGES = torch.tensor([[[0, 19], [3, 4], [5, 5], [9, 2]], [[18, 19], [2, 17], [-4, 3], [7, 99]]])


def seen(key_ranges, seqlen_k):
    j = torch.arange(seqlen_k)
    return ((j >= key_ranges[..., :1]) & (j < key_ranges[..., 1:]))[:, None]


def test_masked_grouped_attention_equals_dense_formula():
    q, k, v = inputs()
    o, lse = attention(q, k, v, RANGES)
    mask = seen(RANGES, 19)
    assert (~mask.any(-1)).sum() == 2, "two queries see no key"
    expected = dense(q, k, v, mask, 8**-0.5)
    assert_close((o, lse), expected, **EXACT)
    assert (o[0, :, 2:] == 0).all() and (lse[0, :, 2:] == -math.inf).all()


def test_scale_softcap_and_alibi_equal_dense_formula():
    q, k, v = inputs()
    slopes = torch.rand(6, dtype=torch.float64)
    positions = torch.randint(100, (2, 4))
    j = torch.arange(19)
    key_positions = 7 + j // 4 * 12 + j % 4
    bias = -slopes[:, None, None] * (positions[:, None, :, None] - key_positions)
    out = attention(
        q, k, v, RANGES, softmax_scale=2.0, softcap=3.0, alibi_slopes=slopes,
        query_positions=positions, key_layout=(7, 4, 12),
    )  # fmt: skip
    expected = dense(q, k, v, seen(RANGES, 19), 2.0, bias, 3.0)
    assert_close(out, expected, **EXACT)


@pytest.mark.parametrize("per_head", [False, True], ids=["shared list", "list per head"])
def test_pages_equal_contiguous(per_head):
    q, k, v = inputs()
    page_size, num_pages = 4, 23
    table = torch.randperm(num_pages)[:20].view(2, 2, 5).int()
    table = table if per_head else table[:, 0]
    k_pages = torch.full((num_pages, 2, page_size, 8), math.nan, dtype=torch.float64)
    v_pages = torch.full((num_pages, 2, page_size, 5), math.nan, dtype=torch.float64)
    for b in range(2):
        for h in range(2):
            for j in range(19):
                page = table[b, h, j // page_size] if per_head else table[b, j // page_size]
                k_pages[page, h, j % page_size] = k[b, h, j]
                v_pages[page, h, j % page_size] = v[b, h, j]
    ranges = RANGES.clamp(max=19)
    paged = attention(q, k_pages, v_pages, ranges, page_table=table)
    assert_close(paged, attention(q, k, v, ranges), **EXACT)
    unread = table.clone()
    unread[1, ..., 3:] = 10**6  # sequence 1 sees its first 12 keys only: no entry past them is read
    ranges[1] = torch.tensor([0, 12])
    paged = attention(q, k_pages, v_pages, ranges, page_table=unread)
    assert_close(paged, attention(q, k, v, ranges), **EXACT)


def test_keys_of_score_minus_infinity_are_no_keys():
    q, k, v = inputs(num_heads_q=1, num_heads_kv=1, seqlen_q=1, batch=1)
    q = q.abs()
    k[:, :, 3:] = -math.inf
    assert_close(attention(q, k, v), attention(q, k[:, :, :3], v[:, :, :3]), **EXACT)
    o, lse = attention(q, k[:, :, 3:], v[:, :, 3:])
    assert (o == 0).all() and (lse == -math.inf).all()


def test_low_precision_yardstick_rounds_every_step():
    q, k, v = inputs(seqlen_k=200)
    truth, _ = attention(q, k, v)
    errors = []
    for dtype in (torch.float32, torch.bfloat16):
        o, lse = attention(q.to(dtype), k.to(dtype), v.to(dtype), dtype=dtype)
        assert o.dtype == lse.dtype == dtype
        errors.append((o.double() - truth).abs().max())
    assert 1e-8 < errors[0] < 1e-5 < 1e-3 < errors[1] < 1e-1


@pytest.mark.parametrize("cuts", [[0, 19], [0, 0, 7, 19, 19], [0, 1, 2, 3, 10, 11, 19]])
def test_merged_parts_equal_the_whole(cuts):
    q, k, v = inputs()
    whole = attention(q, k, v)
    parts = [attention(q, k[:, :, a:b], v[:, :, a:b]) for a, b in pairwise(cuts)]
    o_parts = torch.stack([o for o, _ in parts])
    lse_parts = torch.stack([lse for _, lse in parts])
    o_parts[lse_parts == -math.inf] = math.nan  # an empty part's o may be anything
    assert_close(merge_states(o_parts, lse_parts), whole, **EXACT)


def test_merge_with_empty_changes_no_bit():
    o, lse = torch.tensor([[-0.0, 1.0]], dtype=torch.float64), torch.tensor([3.0]).double()
    empty = torch.full_like(o, math.nan), torch.full_like(lse, -math.inf)
    for merged in (merge((o, lse), empty), merge(empty, (o, lse))):
        assert torch.equal(merged[0].view(torch.int64), o.view(torch.int64))
        assert torch.equal(merged[1], lse)
    o_empty, lse_empty = merge(empty, empty)
    assert (o_empty == 0).all() and (lse_empty == -math.inf).all()
    alone, _ = merge_states(empty[0][None], empty[1][None])
    assert (alone == 0).all()


def test_merge_keeps_nan_in_its_row_and_huge_lse_finite():
    o = torch.ones(3, 2, dtype=torch.float64)
    lse = torch.tensor([math.nan, 1e300, 0.0], dtype=torch.float64)
    merged, merged_lse = merge(
        (o, lse), (o * 3, torch.tensor([0.0, 1e300, 1e4], dtype=torch.float64))
    )
    assert merged[0].isnan().all() and merged_lse[0].isnan()
    assert merged[1:].tolist() == [[2.0, 2.0], [3.0, 3.0]]
    assert merged_lse[1:].tolist() == [1e300, 1e4]


@pytest.mark.parametrize("n", range(1, 20))
def test_canonical_tree_equals_the_doubling_loop(n):
    """A flat gather, a butterfly and a hierarchy of nodes of 2^k ranks share one order of merges:
    the recursive definition and the in-place loop over doubling steps give the same bits."""
    o, lse = torch.randn(n, 5, 3).double(), torch.randn(n, 5).double()
    parts, step = [(o[i], lse[i]) for i in range(n)], 1
    while step < n:
        for i in range(0, n - step, 2 * step):
            parts[i] = merge(parts[i], parts[i + step])
        step *= 2
    assert all(map(torch.equal, parts[0], merge_states(o, lse)))
    for node in (2, 4, 8):
        nodes = [merge_states(o[i : i + node], lse[i : i + node]) for i in range(0, n, node)]
        stacked = torch.stack([o for o, _ in nodes]), torch.stack([lse for _, lse in nodes])
        assert all(map(torch.equal, merge_states(*stacked), parts[0]))
