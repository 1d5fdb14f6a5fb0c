# SPDX-License-Identifier: BSD-3-Clause
"""Gradients through the merge and through attention over shards, against autograd of attention."""

from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck
from torch.testing import assert_close

from distributed import run_ranks
from lab.papers.algorithms.gradient import (
    merge_states_with_gradient,
    process_reduce,
    ring_attention_with_gradient,
    tree_attention_with_gradient,
)
from lab.papers.algorithms.tree import Shard
from tiers import tiers
from tree_attention.reference import merge_states

EXACT = {"rtol": 1e-11, "atol": 1e-11}


def dense(q, k, v, key_ranges=None, scale=None):
    """Attention as autograd differentiates it; every query sees a key."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if key_ranges is not None:
        j = torch.arange(k.shape[2])
        begin, end = key_ranges[:, None, :, :1], key_ranges[:, None, :, 1:]
        scores = scores.masked_fill((j < begin) | (j >= end), -torch.inf)
    return scores.softmax(-1) @ v, torch.logsumexp(scores, -1)


def inputs(seqlen_k, seqlen_q=3, batch=2, heads=4, kv_heads=2, head_dim=5, head_dim_v=3):
    shapes = (
        (batch, heads, seqlen_q, head_dim),
        (batch, kv_heads, seqlen_k, head_dim),
        (batch, kv_heads, seqlen_k, head_dim_v),
    )
    return [torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def gradients(state, tensors, seed=1):
    """Of a loss that depends on every element of o and of lse, each with a weight of its own."""
    generator = torch.Generator().manual_seed(seed)
    loss = sum(
        (x * torch.randn(x.shape, dtype=torch.float64, generator=generator)).sum() for x in state
    )
    return torch.autograd.grad(loss, tensors)


def causal(sizes):
    """The ranges of a causal prompt, of the whole and by rank of queries and of keys."""
    end = torch.arange(1, sum(sizes) + 1)
    whole = torch.stack([torch.zeros_like(end), end], -1).expand(2, -1, -1)
    bounds = [0, *accumulate(sizes)]
    parts = [
        [
            torch.stack([torch.zeros_like(e), (e - low).clamp(0, n)], -1).expand(2, -1, -1)
            for low, n in zip(bounds[:-1], sizes, strict=True)
        ]
        for e in end.split(sizes)
    ]
    return whole, parts


def shards_of(k, v, sizes, ranges=None):
    parts = zip(k.split(sizes, 2), v.split(sizes, 2), strict=True)
    return [Shard(*kv, ranges and ranges[rank]) for rank, kv in enumerate(parts)]


def test_gradcheck_of_the_merge():
    o, lse = torch.randn(5, 2, 3).double(), torch.randn(5, 2).double()
    assert gradcheck(merge_states_with_gradient, (o.requires_grad_(), lse.requires_grad_()))


def test_merge_gradient_equals_autograd_and_leaves_empty_parts_out():
    o, lse = torch.randn(4, 3, 2).double(), torch.randn(4, 3).double()
    o.requires_grad_(), lse.requires_grad_()
    expected = gradients(merge_states(o, lse), (o, lse))
    assert_close(gradients(merge_states_with_gradient(o, lse), (o, lse)), expected, **EXACT)

    with torch.no_grad():
        o_holes, lse_holes = (torch.cat([x[:2], x[:1], x[2:]]) for x in (o, lse))
        o_holes[2], lse_holes[2] = torch.nan, -torch.inf
        o_holes[:, 1], lse_holes[:, 1] = torch.nan, -torch.inf  # a row without any part
    o_holes.requires_grad_(), lse_holes.requires_grad_()
    state = merge_states_with_gradient(o_holes, lse_holes)
    grad_o, grad_lse = gradients(
        [state[0], state[1].masked_fill(state[1].isinf(), 0)], (o_holes, lse_holes)
    )
    assert (grad_o[2] == 0).all() and (grad_lse[2] == 0).all()
    assert (grad_o[:, 1] == 0).all() and (grad_lse[:, 1] == 0).all()
    assert grad_o.isfinite().all() and grad_lse.isfinite().all()
    assert (grad_o[[0, 1, 3, 4]][:, [0, 2]] != 0).all()


@pytest.mark.parametrize("sizes", [[5], [2, 3], [1, 2, 2]])
def test_gradcheck_of_the_tree(sizes):
    q, k, v = inputs(5, 2, 1, 2, 1, 3, 2)

    def tree(q, k, v):
        return tree_attention_with_gradient(q, shards_of(k, v, sizes), softmax_scale=0.7)

    assert gradcheck(tree, (q, k, v))


@pytest.mark.parametrize("sizes", tiers([[2, 3]], [[4], [1, 2, 1]]))
def test_gradcheck_of_the_causal_ring(sizes):
    q, k, v = inputs(sum(sizes), sum(sizes), 2, 2, 1, 3, 2)
    _, ranges = causal(sizes)

    def ring(q, k, v):
        states = ring_attention_with_gradient(q.split(sizes, 2), shards_of(k, v, sizes), ranges)
        return tuple(x for state in states for x in state)

    assert gradcheck(ring, (q, k, v))


@settings(max_examples=20)
@given(st.integers(0, 2**31), st.lists(st.integers(0, 5), min_size=1, max_size=6), st.booleans())
def test_tree_gradient_equals_autograd_of_attention(seed, sizes, masked):
    """Any shards, empty ones too; masked, the queries are the last ones of the context."""
    torch.manual_seed(seed)
    sizes = [*sizes, 3]
    q, k, v = inputs(sum(sizes))
    whole, parts = causal(sizes)
    # The last shard has as many keys as there are queries.
    key_ranges, by_rank = (whole[:, -3:], parts[-1]) if masked else (None, None)
    state = tree_attention_with_gradient(q, shards_of(k, v, sizes, by_rank))
    expected = dense(q, k, v, key_ranges)
    assert_close(state, expected, **EXACT)
    assert_close(gradients(state, (q, k, v)), gradients(expected, (q, k, v)), **EXACT)


@settings(max_examples=20)
@given(st.integers(0, 2**31), st.lists(st.integers(0, 4), min_size=1, max_size=5))
def test_causal_ring_gradient_equals_autograd_of_attention(seed, sizes):
    torch.manual_seed(seed)
    sizes = [*sizes, 1]
    q, k, v = inputs(sum(sizes), sum(sizes))
    whole, parts = causal(sizes)
    states = ring_attention_with_gradient(q.split(sizes, 2), shards_of(k, v, sizes), parts)
    state = [torch.cat(x, 2) for x in zip(*states, strict=True)]
    expected = dense(q, k, v, whole)
    assert_close(tuple(state), expected, **EXACT)
    assert_close(gradients(state, (q, k, v)), gradients(expected, (q, k, v)), **EXACT)


def test_ring_and_tree_of_the_same_queries_have_the_same_gradients():
    """In decoding every rank of the ring has all queries; one of them takes part in the loss."""
    sizes = [3, 0, 4]
    q, k, v = inputs(7)
    tree = tree_attention_with_gradient(q, shards_of(k, v, sizes))
    ring = ring_attention_with_gradient([q] * 3, shards_of(k, v, sizes))[1]
    assert_close(gradients(ring, (q, k, v)), gradients(tree, (q, k, v)), **EXACT)


def test_gradient_through_local_attention_and_the_merge_is_that_of_the_tree():
    """The chain rule in two steps: each rank's own attention, then the merge of the states."""
    sizes = [3, 1, 4]
    q, k, v = inputs(8)
    parts = [tree_attention_with_gradient(q, [shard]) for shard in shards_of(k, v, sizes)]
    o_parts, lse_parts = (torch.stack(x) for x in zip(*parts, strict=True))
    merged = merge_states_with_gradient(o_parts, lse_parts)
    tree = tree_attention_with_gradient(q, shards_of(k, v, sizes))
    assert_close(merged, tree, **EXACT)
    assert_close(gradients(merged, (q, k, v)), gradients(tree, (q, k, v)), **EXACT)


def test_rows_without_keys_give_and_get_no_gradient():
    q, k, v = inputs(6)
    ranges = torch.tensor([[0, 3], [2, 2], [1, 3]]).expand(2, 3, 2)
    shards = shards_of(k, v, [3, 3], [ranges, torch.zeros_like(ranges)])
    o, _ = tree_attention_with_gradient(q, shards)
    assert (o[:, :, 1] == 0).all()
    grad_q, grad_k, grad_v = gradients([o], (q, k, v))
    assert (grad_q[:, :, 1] == 0).all() and (grad_q[:, :, [0, 2]] != 0).any(-1).all()
    assert (grad_k[:, :, 3:] == 0).all() and (grad_v[:, :, 3:] == 0).all()
    assert (grad_v[:, :, :3] != 0).all()


def gradients_on_processes(rank, world_size):
    torch.manual_seed(0)
    sizes = [3, 0, 4][:world_size]
    q, k, v = inputs(sum(sizes))
    k_own, v_own = (x.detach().split(sizes, 2)[rank].requires_grad_() for x in (k, v))
    state = tree_attention_with_gradient(q, [Shard(k_own, v_own)], reduce=process_reduce())
    grad_q, grad_k, grad_v = gradients(state, (q, k_own, v_own))
    whole_q, whole_k, whole_v = gradients(dense(q, k, v), (q, k, v))
    assert_close(grad_q, whole_q, **EXACT)
    assert_close(grad_k, whole_k.split(sizes, 2)[rank], **EXACT)
    assert_close(grad_v, whole_v.split(sizes, 2)[rank], **EXACT)
    return k_own.shape[2]


@pytest.mark.parametrize("world_size", [2, 3])
def test_tree_gradient_on_processes(world_size):
    assert run_ranks(gradients_on_processes, world_size) == [3, 0, 4][:world_size]
