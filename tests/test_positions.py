# SPDX-License-Identifier: BSD-3-Clause
"""Biases by position: their values as published, and the same attention on shards."""

import pytest
import torch
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.t5.modeling_t5 import T5Attention

from helpers import make_problem
from tree_attention import lean_decode, merge_states, patterns
from tree_attention.positions import alibi_slopes, decode_with_range_bias, t5_ranges
from tree_attention.sharding import BlockCyclic


def test_published_slopes() -> None:
    assert alibi_slopes(8).tolist() == [2.0**-i for i in range(1, 9)]
    assert alibi_slopes(1).tolist() == [2.0**-8]


@pytest.mark.parametrize("num_heads", [1, 2, 3, 5, 12, 16, 40, 71, 112])
def test_slopes_of_any_number_of_heads(num_heads: int) -> None:
    """Those that BLOOM has in transformers."""
    alibi = build_alibi_tensor(torch.ones(1, 2), num_heads, torch.float32)  # [heads, 1, 2]
    torch.testing.assert_close(alibi_slopes(num_heads), alibi[:, 0, 1], rtol=1e-6, atol=0)


def test_slopes_in_lean_decode(device: torch.device) -> None:
    problem = make_problem(batch=2, num_heads_kv=3, group_size=4, seqlen_q=2, ranges="causal")
    problem.options["alibi_slopes"] = alibi_slopes(12)
    problem.options["query_positions"] = torch.tensor([[100, 101], [70, 71]])
    problem.to(device).run_and_check()


@pytest.mark.parametrize("num_buckets, max_distance", [(32, 128), (8, 20), (2, 3), (7, 50)])
def test_t5_ranges_are_the_buckets_of_t5(num_buckets: int, max_distance: int) -> None:
    slots = torch.tensor([[0, 1, 5, 130, 1000]])
    ranges = t5_ranges(slots, num_buckets=num_buckets, max_distance=max_distance)
    for slot, of_query in zip(slots[0].tolist(), ranges[0].tolist(), strict=True):
        distance = torch.arange(slot + 1) - slot
        expected = T5Attention._relative_position_bucket(distance, False, num_buckets, max_distance)
        actual = torch.full((slot + 1,), -1)
        for bucket, (begin, end) in enumerate(of_query):
            assert (actual[begin:end] == -1).all(), "no slot is in two buckets"
            actual[begin:end] = bucket
        assert actual.tolist() == expected.tolist()


def biased(problem, slots, bias):
    """T5's attention in float64."""
    q, k, v = (x.double() for x in (problem.q, problem.k, problem.v))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    distance = torch.arange(k.shape[2]) - slots[..., None]  # [batch, seqlen_q, keys]
    buckets = T5Attention._relative_position_bucket(distance, False, 32, 128)
    scores = q @ k.mT + bias[:, buckets].transpose(0, 1)  # T5 does not scale
    scores = scores.masked_fill((distance > 0)[:, None], -torch.inf)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_t5_attention_on_shards(world_size: int, device: torch.device) -> None:
    problem = make_problem(batch=2, seqlen_q=2, seqlen_k=200)
    slots = torch.tensor([[198, 199], [20, 150]])
    bias = torch.randn(8, 32)
    layout = BlockCyclic(world_size, 16)
    states = []
    for rank in range(world_size):
        shard = problem.shard(layout, rank).to(device)
        local = patterns.local(t5_ranges(slots), layout, rank).to(device)
        states.append(
            decode_with_range_bias(
                shard.q, shard.k, shard.v, local, bias.to(device), softmax_scale=1.0
            )
        )
    o, lse = merge_states(*(torch.stack(x) for x in zip(*states, strict=True)))
    expected = biased(problem, slots, bias)
    torch.testing.assert_close(o.cpu().double(), expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.cpu().double(), expected[1], rtol=1e-5, atol=1e-5)
    plain, _ = lean_decode(problem.q, problem.k, problem.v, softmax_scale=1.0)
    assert (plain.double() - expected[0]).abs().max() > 0.1, "the bias matters"


def test_slopes_whatever_the_default_dtype() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        assert alibi_slopes(6).dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


def test_errors() -> None:
    problem = make_problem(batch=1)
    ranges = t5_ranges(torch.tensor([[149]]))
    with pytest.raises(
        ValueError, match=r"alibi_slopes: num_heads_q must be .* from 1 to 65536, got 0"
    ):
        alibi_slopes(0)
    with pytest.raises(ValueError, match="max_distance must be an integer of at least 17, got 16"):
        t5_ranges(torch.tensor([[1]]), max_distance=16)
    with pytest.raises(
        ValueError, match=r"t5_ranges: slots must be integers of shape \[batch, seq"
    ):
        t5_ranges(torch.tensor([[1.0]]))
    for wrong in (ranges[:, 0], ranges[:, :, :0]):
        with pytest.raises(ValueError, match="with at least 1 range, got"):
            decode_with_range_bias(problem.q, problem.k, problem.v, wrong, torch.zeros(8, 32))
    with pytest.raises(ValueError, match=r"= \[8, 32\], got \[8, 31\]"):
        decode_with_range_bias(problem.q, problem.k, problem.v, ranges, torch.zeros(8, 31))
