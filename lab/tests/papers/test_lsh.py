# SPDX-License-Identifier: BSD-3-Clause
"""Reformer's rounds merge to attention over what they see together."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from lab.papers.lsh import hash_rounds, lsh_attention, seen_keys

EXACT = {"rtol": 1e-12, "atol": 1e-12}


def inputs(seed=0, seqlen=48, head_dim=8):
    generator = torch.Generator().manual_seed(seed)
    x = 4 * torch.randn(seqlen, head_dim, dtype=torch.float64, generator=generator)
    return x, torch.randn(seqlen, 3, dtype=torch.float64, generator=generator), generator


def masked(x, v, mask):
    keys = x / x.norm(dim=-1, keepdim=True)
    scores = (x @ keys.T * x.shape[1] ** -0.5).masked_fill(~mask, -torch.inf)
    return scores.softmax(-1) @ v, torch.logsumexp(scores, -1)


def others(seqlen, causal):
    """Every other key; the first query of a causal row has none, and sees itself."""
    mask = ~torch.eye(seqlen, dtype=torch.bool)
    if causal:
        mask = mask.tril()
        mask[0, 0] = True
    return mask


@pytest.mark.parametrize("causal", [False, True], ids=["all keys", "causal"])
@pytest.mark.parametrize("rounds", [1, 2, 5])
def test_one_bucket_of_one_chunk_is_exact(rounds, causal):
    """Every round sees everything, so each key is found as often as there are rounds."""
    x, v, generator = inputs()
    seen = seen_keys(hash_rounds(x, 1, rounds, generator), 48, causal=causal)
    assert_close(lsh_attention(x, v, seen), masked(x, v, others(48, causal)), **EXACT)


@settings(max_examples=30)
@given(
    st.integers(0, 2**31), st.integers(1, 6), st.integers(1, 12), st.integers(1, 40), st.booleans()
)
def test_rounds_are_attention_over_their_union(seed, rounds, half_buckets, chunk, causal):
    x, v, generator = inputs(seed)
    seen = seen_keys(hash_rounds(x, 2 * half_buckets, rounds, generator), chunk, causal=causal)
    assert seen.any(0).any(-1).all(), "every query sees a key"
    assert_close(lsh_attention(x, v, seen), masked(x, v, seen.any(0)), **EXACT)


def test_a_query_sees_its_bucket_in_its_chunk_and_the_one_before():
    """Sorted by bucket: 1 3 5 | 0 2 4 | 6, with buckets 0 0 0 | 1 1 1 | 1."""
    seen = seen_keys(torch.tensor([[1, 0, 1, 0, 1, 0, 1]]), 3)[0]
    rows = {i: row.nonzero().flatten().tolist() for i, row in enumerate(seen)}
    assert rows == {0: [2, 4], 1: [3, 5], 2: [0, 4], 3: [1, 5], 4: [0, 2], 5: [1, 3], 6: [0, 2, 4]}
    causal = seen_keys(torch.tensor([[1, 0, 1, 0, 1, 0, 1]]), 3, causal=True)[0]
    rows = {i: row.nonzero().flatten().tolist() for i, row in enumerate(causal)}
    assert rows == {0: [0], 1: [1], 2: [0], 3: [1], 4: [0, 2], 5: [1, 3], 6: [0, 2, 4]}


def test_hash_keeps_near_vectors_together_and_opposite_ones_apart():
    x, _, generator = inputs(seqlen=400)
    buckets = hash_rounds(torch.cat([x, x * 1.5 + 1e-6, -x]), 16, 8, generator)
    same, near, opposite = buckets.split(400, 1)
    assert buckets.min() == 0 and buckets.max() == 15
    assert (same == near).double().mean() > 0.999
    assert ((same - opposite).abs() == 8).all()


def test_without_the_correction_a_key_counts_once_for_each_round():
    """It guards the correction: the plain merge of the rounds is another, wrong result."""
    x, v, generator = inputs()
    seen = seen_keys(hash_rounds(x, 4, 4, generator), 24)
    assert (seen.sum(0) > 1).any(-1).any(), "some keys are found twice"
    lse_of_rounds = torch.stack([lsh_attention(x, v, one[None])[1] for one in seen])
    _, lse = lsh_attention(x, v, seen)
    assert (lse_of_rounds.logsumexp(0) > lse + 0.1).any()


def test_more_rounds_see_more_and_err_less():
    x, v, generator = inputs(seqlen=256)
    exact, _ = masked(x, v, others(256, False))
    buckets = hash_rounds(x, 16, 32, generator)
    recall, error = [], []
    for rounds in (1, 2, 4, 8, 16, 32):
        seen = seen_keys(buckets[:rounds], 32)
        recall.append(seen.any(0).double().mean().item())
        o, _ = lsh_attention(x, v, seen)
        error.append(((o - exact).norm() / exact.norm()).item())
    assert all(a < b for a, b in pairwise(recall))
    assert all(a > b for a, b in pairwise(error))
    assert error[0] > 4 * error[-1]
