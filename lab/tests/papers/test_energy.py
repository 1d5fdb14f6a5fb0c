# SPDX-License-Identifier: BSD-3-Clause
"""Attention as the gradient of an energy, and Tree Attention's algorithms, to 1e-12."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd.functional import hessian
from torch.testing import assert_close

from lab.papers.algorithms.energy import (
    attention_from_energy,
    energy,
    energy_gradient,
    energy_hessian,
    safe_energy,
)
from lab.papers.algorithms.tree import (
    Shard,
    all_reduce,
    tree_attention,
    tree_energy,
    tree_gradient,
)
from tree_attention.reference import attention, merge
from tree_attention.sharding import BlockCyclic, Contiguous, ShardLayout

EXACT = {"rtol": 1e-12, "atol": 1e-12}


def inputs(batch=2, num_heads_q=4, num_heads_kv=2, seqlen_q=3, seqlen_k=11, head_dim=6, dim_v=4):
    q = torch.randn(batch, num_heads_q, seqlen_q, head_dim, dtype=torch.float64)
    k = torch.randn(batch, num_heads_kv, seqlen_k, head_dim, dtype=torch.float64)
    v = torch.randn(batch, num_heads_kv, seqlen_k, dim_v, dtype=torch.float64)
    zeta = torch.randn(batch, num_heads_q, seqlen_q, dim_v, dtype=torch.float64)
    return q, k, v, zeta


def causal_ranges(batch, seqlen_q, seqlen_k):
    """Query i stands at position `seqlen_k - seqlen_q + i`."""
    end = torch.arange(seqlen_k - seqlen_q + 1, seqlen_k + 1)
    return torch.stack([torch.zeros_like(end), end], -1).expand(batch, -1, -1)


CAUSAL = pytest.mark.parametrize("causal", [False, True], ids=["all keys", "causal"])


@CAUSAL
def test_gradient_at_zero_is_attention(causal):
    q, k, v, zeta = inputs()
    key_ranges = causal_ranges(2, 3, 11) if causal else None
    o, lse = attention(q, k, v, key_ranges)
    assert_close(attention_from_energy(q, k, v, key_ranges), (o, lse), **EXACT)
    assert_close(energy_gradient(q, k, v, zeta * 0, key_ranges), o, **EXACT)
    assert_close(energy(q, k, v, zeta * 0, key_ranges), lse, **EXACT)


@CAUSAL
def test_gradient_by_hand_equals_autograd_and_finite_differences(causal):
    q, k, v, zeta = inputs()
    key_ranges = causal_ranges(2, 3, 11) if causal else None
    zeta.requires_grad_()
    total = energy(q, k, v, zeta, key_ranges).sum()
    (by_autograd,) = torch.autograd.grad(total, zeta)
    by_hand = energy_gradient(q, k, v, zeta.detach(), key_ranges)
    assert_close(by_hand, by_autograd, **EXACT)

    direction, h = torch.randn_like(zeta), 1e-5
    with torch.no_grad():
        above = energy(q, k, v, zeta + h * direction, key_ranges)
        below = energy(q, k, v, zeta - h * direction, key_ranges)
    slope = (above - below) / (2 * h)
    assert_close((by_hand * direction).sum(-1), slope, rtol=1e-8, atol=1e-8)


def test_gradient_elsewhere_is_attention_with_tilted_scores():
    """`zeta.v_a` enters like one more query and key dimension."""
    q, k, v, zeta = inputs()
    scale = 6**-0.5
    q_tilted = torch.cat([q * scale, zeta], -1)
    o, lse = attention(q_tilted, torch.cat([k, v], -1), v, softmax_scale=1.0)
    assert_close(energy_gradient(q, k, v, zeta), o, **EXACT)
    assert_close(energy(q, k, v, zeta), lse, **EXACT)


def test_hessian_is_the_covariance_and_the_energy_is_convex():
    q, k, v, zeta = inputs(batch=1, num_heads_q=2, num_heads_kv=1, seqlen_q=2)
    by_hand = energy_hessian(q, k, v, zeta)
    full = hessian(lambda z: energy(q, k, v, z).sum(), zeta).flatten(4).flatten(0, 3)
    full = full.view(2 * 2, 4, 2 * 2, 4)
    for row in range(4):
        assert_close(full[row, :, row], by_hand.flatten(0, 2)[row], **EXACT)
        full[row, :, row] = 0
    assert (full == 0).all(), "rows do not interact"
    smallest = torch.linalg.eigvalsh(by_hand).min()
    assert smallest > -1e-12
    assert by_hand.abs().max() > 0.1, "the values do vary"

    other = zeta + torch.randn_like(zeta)
    middle = energy(q, k, v, (zeta + other) / 2)
    assert (middle < (energy(q, k, v, zeta) + energy(q, k, v, other)) / 2).all()


def test_safe_shift_keeps_value_and_gradient():
    q, k, v, zeta = inputs()
    zeta.requires_grad_()
    shift, relative = safe_energy(q, k, v, zeta)
    assert not shift.requires_grad
    assert_close(shift + relative, energy(q, k, v, zeta), **EXACT)
    (gradient,) = torch.autograd.grad(relative.sum(), zeta)
    assert_close(gradient, energy_gradient(q, k, v, zeta.detach()), **EXACT)


def test_safe_shift_survives_scores_that_overflow_exp():
    q, k, v, zeta = inputs()
    q = q * 1e4
    with torch.no_grad():
        scores = q @ k.repeat_interleave(2, 1).mT
        assert scores.exp().isinf().any()
        shift, relative = safe_energy(q, k, v, zeta * 0)
        assert relative.isfinite().all() and (relative >= 0).all()
        assert (relative <= math.log(11)).all()
        assert_close(shift + relative, energy(q, k, v, zeta * 0), **EXACT)


def test_energies_of_joined_contexts_add_in_the_exponent():
    q, k, v, zeta = inputs()
    cut = [(k[:, :, :4], v[:, :, :4]), (k[:, :, 4:], v[:, :, 4:])]
    energies = [energy(q, *part, zeta) for part in cut]
    assert_close(torch.logaddexp(*energies), energy(q, k, v, zeta), **EXACT)
    gradients = [energy_gradient(q, *part, zeta) for part in cut]
    merged, _ = merge(*zip(gradients, energies, strict=True))
    assert_close(merged, energy_gradient(q, k, v, zeta), **EXACT)


def test_causal_row_does_not_depend_on_later_keys():
    q, k, v, zeta = inputs(seqlen_q=5, seqlen_k=5)
    key_ranges = causal_ranges(2, 5, 5)
    before = energy(q, k, v, zeta, key_ranges)
    k[:, :, 3:], v[:, :, 3:] = 9.0, -9.0
    after = energy(q, k, v, zeta, key_ranges)
    assert torch.equal(before[:, :, :3], after[:, :, :3])
    assert ((before - after)[:, :, 3:].abs() > 0.01).any(dim=(0, 1)).all()


def test_effective_action_is_stationary_at_attention_and_a_saddle():
    """Gamma(z, zeta) = z.zeta - F(zeta): the pair (attention, 0) is stationary; Gamma is linear in
    z and concave in zeta, so it is a saddle and no maximum."""
    q, k, v, _ = inputs(batch=1, num_heads_q=1, num_heads_kv=1, seqlen_q=1)
    o, _ = attention(q, k, v)

    def gamma(point):
        z, zeta = point.view(2, 1, 1, 1, 4)
        return (z * zeta).sum() - energy(q, k, v, zeta).sum()

    point = torch.cat([o.flatten(), torch.zeros(4, dtype=torch.float64)])
    (gradient,) = torch.autograd.grad(gamma(point.requires_grad_()), point)
    assert_close(gradient, torch.zeros_like(point), **EXACT)
    curvature = torch.linalg.eigvalsh(hessian(gamma, point.detach()))
    assert curvature.min() < -0.1 and curvature.max() > 0.1


def test_effective_action_as_printed_is_stationary_elsewhere():
    """Eq. 30 has F inside its double sum, so that each of the head_dim components subtracts it."""
    q, k, v, zeta = inputs(batch=1, num_heads_q=1, num_heads_kv=1, seqlen_q=1)
    o, _ = attention(q, k, v)
    zeta = torch.zeros_like(zeta).requires_grad_()
    printed = (o * zeta - energy(q, k, v, zeta)[..., None]).sum()
    (gradient,) = torch.autograd.grad(printed, zeta)
    assert_close(gradient, (1 - o.shape[-1]) * o, **EXACT)


def test_no_keys_give_energy_minus_infinity_and_gradient_zero():
    q, k, v, zeta = inputs()
    none = torch.zeros(2, 3, 2, dtype=torch.int64)
    assert (energy(q, k, v, zeta, none) == -math.inf).all()
    assert (energy_gradient(q, k, v, zeta, none) == 0).all()
    o, lse = attention_from_energy(q, k, v, none)
    assert (o == 0).all() and (lse == -math.inf).all()
    for shift, relative in (safe_energy(q, k[:, :, :0], v[:, :, :0], zeta),):
        assert (shift == 0).all() and (relative == -math.inf).all()


# Tree Attention's algorithms over a simulated world.


def shards_of(k, v, layout: ShardLayout, key_ranges=None) -> list[Shard]:
    shards = []
    for rank in range(layout.world_size):
        slots = layout.local_slots(rank, 0, k.shape[2])
        ranges = None
        if key_ranges is not None:
            begin, end = layout.local_range(rank, key_ranges[..., 0], key_ranges[..., 1])
            ranges = torch.stack([begin, end], -1)
        shards.append(Shard(k[:, :, slots], v[:, :, slots], ranges))
    return shards


LAYOUTS = {
    "one rank": Contiguous([0, 11]),
    "even": Contiguous([0, 4, 8, 11]),
    "uneven, empty shards": Contiguous([0, 0, 1, 9, 9, 9, 11]),
    "more ranks than keys": Contiguous([*range(12), *[11] * 5]),
    "block cyclic": BlockCyclic(3, 2),
}


@CAUSAL
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_algorithms_equal_attention(layout, causal):
    """Batch 2 guards against the paper's listing, whose denominator broadcasts wrongly there."""
    q, k, v, zeta = inputs()
    key_ranges = causal_ranges(2, 3, 11) if causal else None
    shards = shards_of(k, v, layout, key_ranges)
    assert sum(shard.k.shape[2] for shard in shards) == 11
    o, lse = attention(q, k, v, key_ranges)

    shift, relative = tree_energy(q, zeta * 0, shards)
    assert_close(shift + relative, lse, **EXACT)
    assert_close(tree_gradient(q, zeta * 0, shards), o, **EXACT)
    assert_close(tree_attention(q, shards), (o, lse), **EXACT)

    assert_close(sum(tree_energy(q, zeta, shards)), energy(q, k, v, zeta, key_ranges), **EXACT)
    tilted = energy_gradient(q, k, v, zeta, key_ranges)
    assert_close(tree_gradient(q, zeta, shards), tilted, **EXACT)


def test_algorithm_1_is_differentiable():
    """The paper's other way to Algorithm 2: one backward pass through the tree."""
    q, k, v, zeta = inputs()
    shards = shards_of(k, v, LAYOUTS["uneven, empty shards"])
    zeta.requires_grad_()
    shift, relative = tree_energy(q, zeta, shards)
    (gradient,) = torch.autograd.grad((shift + relative).sum(), zeta)
    assert_close(gradient, energy_gradient(q, k, v, zeta.detach()), **EXACT)


def test_rows_without_keys_on_any_rank_are_empty():
    q, k, v, zeta = inputs()
    key_ranges = torch.tensor([[0, 11], [4, 4], [10, 11]]).expand(2, 3, 2)
    shards = shards_of(k, v, LAYOUTS["block cyclic"], key_ranges)
    o, lse = tree_attention(q, shards)
    assert (lse[:, :, 1] == -math.inf).all() and (o[:, :, 1] == 0).all()
    assert_close((o, lse), attention(q, k, v, key_ranges), **EXACT)
    shift, relative = tree_energy(q, zeta, shards)
    assert (relative[:, :, 1] == -math.inf).all() and (shift[:, :, 1] == 0).all()
    gradient = tree_gradient(q, zeta, shards)
    assert (gradient[:, :, 1] == 0).all() and gradient.isfinite().all()


def test_scores_that_overflow_exp_stay_finite():
    q, k, v, zeta = inputs()
    q = q * 1e4
    shards = shards_of(k, v, LAYOUTS["block cyclic"])
    o, lse = attention(q, k, v)
    assert lse.abs().min() > 1000
    assert_close(tree_attention(q, shards), (o, lse), **EXACT)
    assert_close(tree_gradient(q, zeta * 0, shards), o, **EXACT)


@settings(max_examples=20)
@given(
    st.integers(0, 2**31),
    st.lists(st.integers(0, 9), min_size=1, max_size=9),
    st.integers(1, 3),
    st.integers(1, 3),
)
def test_any_world_gives_attention(seed, sizes, batch, group_size):
    torch.manual_seed(seed)
    layout = Contiguous([sum(sizes[:i]) for i in range(len(sizes) + 1)])
    q, k, v, zeta = inputs(batch, 2 * group_size, 2, seqlen_k=sum(sizes))
    o, lse = attention(q, k, v)
    shards = shards_of(k, v, layout)
    assert_close(tree_attention(q, shards), (o, lse), **EXACT)
    assert_close(tree_gradient(q, zeta * 0, shards), o, **EXACT)


@given(st.integers(1, 70))
def test_all_reduce_has_logarithmic_depth_and_one_merge_per_part(n):
    """Each part is (depth, merges, first, last + 1): neighbours combine, in order."""

    def combine(a, b):
        assert a[3] == b[2], "lower and upper part adjoin"
        return max(a[0], b[0]) + 1, a[1] + b[1] + 1, a[2], b[3]

    depth, merges, first, end = all_reduce([(0, 0, i, i + 1) for i in range(n)], combine)
    assert depth == math.ceil(math.log2(n))
    assert (merges, first, end) == (n - 1, 0, n)
