# SPDX-License-Identifier: BSD-3-Clause
"""Efficient attention of the survey: equal to a matrix of weights in float64, and by our operators.

Each reference runs twice: through the definitions, to 1e-12, and through `lean_decode` and
`merge_states` in float32, within twice the error of plain float32 PyTorch.
"""

import pytest
import torch
from torch.testing import assert_close

from lab.papers.lsh import hash_rounds, lsh_attention, seen_keys
from lab.papers.survey import OURS, REFERENCE, Operators, fixed
from lab.papers.survey.low_rank import (
    Projected,
    averages,
    low_rank_attention,
    pool,
    pooled_attention,
)
from lab.papers.survey.recurrence import Layer, run_segments
from lab.papers.survey.routing import (
    nearest,
    routed_attention,
    sinkhorn,
    sort_blocks,
    sorted_block_attention,
    updated,
)
from lab.papers.survey.sorted_chunks import sorted_lsh_attention
from tree_attention import reference
from tree_attention.reference.accuracy import bound_of_o, row_error

EXACT = {"rtol": 1e-12, "atol": 1e-12}
N, D = 48, 16


def randn(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def inputs(seed=0, heads=2, tokens=N):
    q, k, v = randn(3, 2, heads, tokens, D, seed=seed)
    return q, k, v


def by_matrix(q, k, v, mask):
    """Attention over the keys of a mask; 0 for a query without any."""
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~mask, -torch.inf)
    return scores.softmax(-1).nan_to_num(0.0) @ v


def plain_attend(*arguments):
    return reference.attention(*arguments, dtype=torch.float32)


def plain_merge(*parts):
    return tuple(x.float() for x in reference.merge_states(*parts))


PLAIN = Operators(plain_attend, plain_merge)


def check(function, truth, *tensors):
    """`function(operators, *tensors)` gives the truth in float64, and by our operators."""
    assert_close(function(REFERENCE, *tensors), truth, **EXACT)
    narrow = [x.float() for x in tensors]
    error_of_plain = row_error(function(PLAIN, *narrow).double(), truth)
    ours = function(OURS, *narrow)
    assert ours.dtype == torch.float32
    assert row_error(ours, truth) <= bound_of_o(error_of_plain, torch.float32)


def test_low_rank_is_attention_to_projected_keys_of_all_shards():
    q, k, v = inputs()
    e, f = randn(2, 2, 12, N, seed=1)
    truth = by_matrix(q, e @ k, f @ v, torch.ones(N, 12, dtype=torch.bool))

    def run(operators, q, k, v, e, f):
        sizes = [5, 0, 30, 13]
        parts = (x.split(sizes, dim) for x, dim in ((k, 2), (v, 2), (e, -1), (f, -1)))
        shards = [Projected(*part) for part in zip(*parts, strict=True)]
        return low_rank_attention(q, shards, operators)[0]

    check(run, truth, q, k, v, e, f)


@pytest.mark.parametrize("causal", [False, True])
def test_pooled_keys_are_a_strided_convolution(causal):
    q, k, v = inputs(tokens=50)
    w_k, w_v = randn(2, 2, 3, D, D, seed=1)
    convolved = [
        torch.stack(
            [
                torch.nn.functional.conv1d(x[:, h].mT, w[h].permute(2, 1, 0), stride=3).mT
                for h in range(2)
            ],
            dim=1,
        )
        for x, w in ((k, w_k), (v, w_v))
    ]
    assert convolved[0].shape[2] == 16, "two tokens are left over"
    ends = (torch.arange(50)[:, None] + 1) // 3 if causal else 16
    truth = by_matrix(q, *convolved, torch.arange(16) < torch.as_tensor(ends))

    def run(operators, q, k, v, w_k, w_v):
        return pooled_attention(q, k, v, w_k, w_v, causal=causal, operators=operators)[0]

    check(run, truth, q, k, v, w_k, w_v)
    if causal:
        assert not run(REFERENCE, q, k, v, w_k, w_v)[:, :, :2].any()


def test_averages_are_a_pool_and_a_projection():
    _, k, _ = inputs()
    weight = torch.eye(D, dtype=torch.float64).expand(2, 4, D, D) / 4
    assert_close(averages(N, 4) @ k, pool(k, weight), **EXACT)


SLOTS = torch.arange(N).expand(2, -1)
I, J = torch.arange(N)[:, None], torch.arange(N)  # noqa: E741
BY_HEAD = {
    "blockwise": (
        [fixed.blockwise(SLOTS, 12, x) for x in ([0, 1, 2, 3], [2, 0, 3, 1])],
        [I // 12 == J // 12, torch.tensor([2, 0, 3, 1])[I // 12] == J // 12],
    ),
    "strided": (
        fixed.strided(SLOTS, 7, 2),
        [(J <= I) & (J > I - 7), (J <= I) & ((I - J) % 7 == 0)],
    ),
    "axial": (
        fixed.axial(SLOTS, 8, 2),
        [(J <= I) & (I // 8 == J // 8), (J <= I) & (I % 8 == J % 8)],
    ),
}


@pytest.mark.parametrize("name", BY_HEAD)
def test_heads_have_patterns_of_their_own(name):
    q, k, v = inputs()
    ranges, masks = BY_HEAD[name]
    assert not torch.equal(*masks)
    truth = by_matrix(q, k, v, torch.stack(masks))
    check(lambda operators, *x: fixed.attend_by_head(*x, ranges, operators)[0], truth, q, k, v)


def layers(number, heads=2, width=8):
    return [
        Layer(*(w / width**0.5 for w in randn(3, heads, width, D, seed=s)), randn(heads, D, width))
        for s in range(number)
    ]


def whole_causal(x, stack):
    """The same layers, each over all tokens at once."""
    for w_q, w_k, w_v, w_o in stack:
        q, k, v = (torch.einsum("bnw,hwd->bhnd", x, w) for w in (w_q, w_k, w_v))
        o = by_matrix(q, k, v, J <= I)
        x = x + torch.einsum("bhnd,hdw->bnw", o, w_o)
    return x


def segments(operators, x, *weights, **options):
    stack = [Layer(*weights[i : i + 4]) for i in range(0, len(weights), 4)]
    return run_segments(x, stack, segment=8, operators=operators, **options)


def test_recurrence_with_a_memory_of_everything_is_causal_attention():
    x, stack = 0.5 * randn(2, N, 8, seed=5), layers(2)
    weights = [w for layer in stack for w in layer]
    check(
        lambda operators, *t: segments(operators, *t, memory_length=N),
        whole_causal(x, stack), x, *weights,
    )  # fmt: skip


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_layer_of_recurrence_reaches_one_memory_further(number):
    """Transformer-XL, section 3.2: the longest dependency grows with layers times the memory."""
    stack = layers(number)
    x = 0.5 * randn(1, N, 8, seed=5)
    changed = x.clone()
    changed[:, :8] += 1  # the first of six segments
    difference = (
        run_segments(x, stack, segment=8, memory_length=8)
        - run_segments(changed, stack, segment=8, memory_length=8)
    ).abs()
    reached = [bool(part.max() > 1e-9) for part in difference.split(8, 1)]
    assert reached == [True] * (number + 1) + [False] * (5 - number)


def test_compressed_memory_is_the_average_of_what_has_left():
    """One layer: each query sees its segment, the one before, and averages of 4 older tokens."""
    (layer,) = layers(1)
    x = 0.5 * randn(2, N, 8, seed=5)
    expected = []
    for begin in range(0, N, 8):
        old = x[:, : max(0, begin - 8)].unflatten(1, (-1, 4)).mean(2)
        seen = torch.cat([old, x[:, max(0, begin - 8) : begin + 8]], dim=1)
        own = x[:, begin : begin + 8]
        q, k, v = (
            torch.einsum("bnw,hwd->bhnd", y, w)
            for y, w in ((own, layer.w_q), (seen, layer.w_k), (seen, layer.w_v))
        )
        mask = torch.arange(k.shape[2]) <= k.shape[2] - 8 + torch.arange(8)[:, None]
        o = by_matrix(q, k, v, mask)
        expected.append(own + torch.einsum("bhnd,hdw->bnw", o, layer.w_o))
    check(
        lambda operators, *t: segments(operators, *t, memory_length=8, rate=4),
        torch.cat(expected, dim=1), x, *layer,
    )  # fmt: skip


@pytest.mark.parametrize("causal", [False, True])
def test_routing_shows_a_query_the_keys_of_its_cluster(causal):
    q, k, v = (x[0, 0] for x in inputs())
    centroids = torch.nn.functional.normalize(randn(5, D, seed=2), dim=-1)
    mask = nearest(q, centroids)[:, None] == nearest(k, centroids)
    mask = mask & (J <= I) if causal else mask
    assert mask.any() and not mask.all() and (not causal or not mask.any(-1).all())
    truth = by_matrix(q, k, v, mask)

    def run(operators, q, k, v, centroids):
        return routed_attention(q, k, v, centroids, causal=causal, operators=operators)[0]

    check(run, truth, q, k, v, centroids)


def test_centroids_move_to_the_clusters():
    centres = torch.linalg.qr(randn(D, D, seed=3))[0][:4]
    x = centres[torch.arange(200) % 4] + 0.1 * randn(200, D, seed=4)
    centroids = torch.nn.functional.normalize(centres + 0.2 * randn(4, D, seed=5), dim=-1)
    before = (centroids * centres).sum(-1)
    for _ in range(5):
        centroids = updated(centroids, x[:100], x[100:], 0.5)
    after = (centroids * centres).sum(-1)
    assert (after > before).all() and (after > 0.99).all()


def test_sinkhorn_is_doubly_stochastic_and_sharp_scores_are_a_permutation():
    scores = randn(2, 2, 6, 6)
    weights = sinkhorn(scores, 200)
    ones = torch.ones(2, 2, 6, dtype=torch.float64)
    assert_close(weights.sum(-1), ones, **EXACT)
    assert_close(weights.sum(-2), ones, **EXACT)
    order = torch.randperm(6, generator=torch.Generator().manual_seed(0))
    permutation = torch.eye(6, dtype=torch.float64)[order].expand(2, 2, 6, 6)
    sharp = sinkhorn(100 * permutation + scores, 50)
    _, k, _ = inputs()
    moved = k.unflatten(2, (6, 8))[:, :, order].flatten(2, 3)
    assert_close(sort_blocks(k, sharp), moved, **EXACT)


def test_sorted_blocks_are_one_set_of_keys_with_the_own_block():
    q, k, v = inputs()
    weights = sinkhorn(randn(2, 2, 6, 6, seed=7), 20)
    both = [torch.cat([x, sort_blocks(x, weights)], dim=2) for x in (k, v)]
    mask = (torch.arange(2 * N) % N) // 8 == I // 8
    truth = by_matrix(q, *both, mask)

    def run(operators, q, k, v, weights):
        return sorted_block_attention(q, k, v, weights, operators)[0]

    check(run, truth, q, k, v, weights)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("rounds", [1, 3])
def test_sorted_chunks_see_what_the_matrix_says(rounds, causal):
    """Of one round; several rounds count a key as often as they find it."""
    x, _, v = (y[0, 0] for y in inputs())
    buckets = hash_rounds(x, 4, rounds, torch.Generator().manual_seed(0))
    seen = torch.cat([seen_keys(one[None], 10, causal=causal) for one in buckets])
    keys = torch.nn.functional.normalize(x, dim=-1)
    often = seen.sum(0).double()
    assert rounds == 1 or (often > 1).any()
    scores = x @ keys.T * D**-0.5 + often.log()
    truth = scores.softmax(-1) @ v
    if rounds == 1:
        assert_close(truth, lsh_attention(x, v, seen)[0], **EXACT)

    def run(operators, x, v):
        return sorted_lsh_attention(x, v, buckets, 10, causal=causal, operators=operators)[0]

    check(run, truth, x, v)
