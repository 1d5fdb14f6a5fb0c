# SPDX-License-Identifier: BSD-3-Clause
"""Reductions with any fan-in and the ring: their results, and what they count."""

from functools import partial, reduce
from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from lab.papers.algorithms.tree import (
    Counts,
    Shard,
    all_reduce,
    ring_attention,
    ring_steps,
    tree_attention,
)
from tree_attention.reference import attention, merge

EXACT = {"rtol": 1e-12, "atol": 1e-12}


def levels_of(ranks, fan_in):
    """The smallest number of levels whose tree has so many leaves."""
    levels = 0
    while fan_in**levels < ranks:
        levels += 1
    return levels


def inputs(seqlen_k, seqlen_q=2):
    q = torch.randn(2, 4, seqlen_q, 6, dtype=torch.float64)
    k, v = (torch.randn(2, 2, seqlen_k, d, dtype=torch.float64) for d in (6, 5))
    return q, k, v


@given(st.integers(1, 300), st.integers(2, 16))
def test_all_reduce_counts_steps_merges_and_messages(ranks, fan_in):
    """Each part is (depth, first, last + 1): neighbours combine, in order, each part once."""

    def combine(a, b):
        assert a[2] == b[1], "lower and upper part adjoin"
        return max(a[0], b[0]) + 1, a[1], b[2]

    counts = Counts()
    parts = [(0, i, i + 1) for i in range(ranks)]
    depth, first, end = all_reduce(parts, combine, fan_in=fan_in, counts=counts)
    levels = levels_of(ranks, fan_in)
    assert (first, end) == (0, ranks)
    assert depth <= counts.merges <= (fan_in - 1) * levels
    assert counts.steps == 2 * levels
    assert counts.messages == 2 * (ranks - 1)


@pytest.mark.parametrize("fan_in", range(2, 17))
def test_depth_and_bytes_of_whole_trees(fan_in):
    counts, part = Counts(), torch.zeros(3)
    ranks = fan_in**2
    all_reduce([part] * ranks, torch.add, fan_in=fan_in, counts=counts)
    assert counts.steps == 4 and counts.merges == 2 * (fan_in - 1)
    assert counts.num_bytes == 2 * (ranks - 1) * 12
    # The first rank sends the result to its group of each level; all others also send upwards.
    assert counts.bytes_sent[0] == 2 * (fan_in - 1) * 12 and counts.bytes_sent[1] == 12
    assert counts.busiest == max(2 * (fan_in - 1), 1 + fan_in - 1) * 12


def test_messages_count_the_tensors_of_a_state():
    o, lse = torch.zeros(2, 3, 5), torch.zeros(2, 3)
    counts = Counts()
    all_reduce([(o.double(), lse.double())] * 2, merge, counts=counts)
    assert counts.num_bytes == 2 * 8 * (30 + 6)


@pytest.mark.parametrize("fan_in", [2, 3, 5, 16])
@pytest.mark.parametrize("ranks", [1, 2, 7, 17])
def test_algorithm_3_with_any_fan_in_is_attention(fan_in, ranks):
    q, k, v = inputs(3 * ranks)
    shards = [Shard(k[:, :, i::ranks], v[:, :, i::ranks]) for i in range(ranks)]
    counts = Counts()
    out = tree_attention(q, shards, reduce=partial(all_reduce, fan_in=fan_in, counts=counts))
    assert_close(out, attention(q, k, v), **EXACT)
    assert counts.steps == 3 * 2 * levels_of(ranks, fan_in)
    # Eq. 13: numerator, denominator and maximum, here of 4 heads of 2 queries in 2 sequences.
    elements = 2 * 4 * 2 * (5 + 2)
    assert counts.num_bytes == 8 * 2 * (ranks - 1) * elements


@pytest.mark.parametrize("ranks", [2, 4, 8, 64, 512])
def test_theorem_1(ranks):
    """N / p - 1 merges of a rank's own part and log2(p) of the parts: log2(N) if p is N."""
    n = 512

    def deeper(a, b):
        return max(a, b) + 1

    local = [reduce(deeper, [0] * (n // ranks))] * ranks
    depth = all_reduce(local, deeper)
    assert depth == n // ranks - 1 + levels_of(ranks, 2)


@settings(max_examples=20)
@given(st.integers(0, 2**31), st.lists(st.integers(0, 5), min_size=1, max_size=7))
def test_ring_of_any_shards_is_attention(seed, sizes):
    """In decoding: all ranks have the same queries. The tree gives the same result."""
    torch.manual_seed(seed)
    q, k, v = inputs(sum(sizes))
    shards = [Shard(*kv) for kv in zip(k.split(sizes, 2), v.split(sizes, 2), strict=True)]
    expected, counts = attention(q, k, v), Counts()
    for state in ring_attention([q] * len(sizes), shards, counts=counts):
        assert_close(state, expected, **EXACT)
    assert_close(tree_attention(q, shards), expected, **EXACT)
    steps = len(sizes) - 1
    assert counts.steps == steps and counts.messages == steps * len(sizes)
    assert counts.num_bytes == steps * (k.nbytes + v.nbytes), "Eq. 10: of all ranks, p - 1 for p"


def test_causal_ring_over_split_queries():
    """A prompt: rank r has queries and keys [bounds[r], bounds[r + 1])."""
    sizes = [3, 0, 5, 1]
    bounds = [0, *accumulate(sizes)]
    q, k, v = inputs(9, seqlen_q=9)
    end = torch.arange(1, 10)
    whole = torch.stack([torch.zeros(9), end], -1).int().expand(2, -1, -1)
    ranges = [
        [
            torch.stack([torch.zeros_like(e), (e - low).clamp(0, size)], -1).expand(2, -1, -1)
            for low, size in zip(bounds[:-1], sizes, strict=True)
        ]
        for e in end.split(sizes)
    ]
    shards = [Shard(*kv) for kv in zip(k.split(sizes, 2), v.split(sizes, 2), strict=True)]
    states = ring_attention(q.split(sizes, 2), shards, ranges)
    o, lse = (torch.cat(x, 2) for x in zip(*states, strict=True))
    assert_close((o, lse), attention(q, k, v, whole), **EXACT)


def test_ring_brings_every_shard_to_every_rank():
    counts = Counts()
    held = list(zip(*ring_steps("abcd", counts), strict=True))
    assert held == [tuple("adcb"), tuple("badc"), tuple("cbad"), tuple("dcba")]
    assert counts.steps == 3 and counts.messages == 12 and counts.num_bytes == 0
