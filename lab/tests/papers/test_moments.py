# SPDX-License-Identifier: BSD-3-Clause
"""Moments of the values from the energy function, and W_O inside the values, to 1e-12."""

import math
from itertools import pairwise

import pytest
import torch
from torch.autograd.functional import hessian
from torch.testing import assert_close

from lab.papers.algorithms.energy import (
    energy,
    energy_hessian,
    fold_output_projection,
    moment,
    moment_from_energy,
    partition_series,
)
from tree_attention.reference import attention, merge

EXACT = {"rtol": 1e-12, "atol": 1e-12}


def inputs(heads=2, kv_heads=1, seqlen_k=7, head_dim_v=3):
    shapes = ((2, heads, 2, 5), (2, kv_heads, seqlen_k, 5), (2, kv_heads, seqlen_k, head_dim_v))
    return [torch.randn(*shape, dtype=torch.float64) for shape in shapes]


RANGES = torch.tensor([[[0, 7], [2, 5]], [[6, 7], [0, 4]]])


@pytest.mark.parametrize("order", [0, 1, 2, 3, 4])
def test_derivatives_of_the_partition_function_are_the_moments(order):
    """Eq. 20, with grouped heads and rows that see some of the keys."""
    q, k, v = inputs()
    by_definition = moment(q, k, v, order, RANGES)
    assert by_definition.shape == (2, 2, 2, *[3] * order)
    assert by_definition.abs().max() > 0.5
    by_autograd = moment_from_energy(q, k, v, order, RANGES)
    assert_close(by_autograd, by_definition, **EXACT)


def test_first_moment_is_attention_and_second_is_covariance_and_mean():
    q, k, v = inputs()
    o, _ = attention(q, k, v, RANGES)
    assert_close(moment(q, k, v, 1, RANGES), o, **EXACT)
    covariance = energy_hessian(q, k, v, torch.zeros_like(o), RANGES)
    outer = o[..., :, None] * o[..., None, :]
    assert_close(moment(q, k, v, 2, RANGES), covariance + outer, **EXACT)


def test_third_derivative_of_the_energy_is_the_third_cumulant():
    """F generates cumulants and not moments, whatever section 4 calls it."""
    q, k, v = inputs(heads=1, head_dim_v=1)
    zeta = torch.zeros(2, 1, 2, 1, dtype=torch.float64)

    def curvature(z):  # d^2 F / d zeta^2 of all rows together, which do not interact
        return hessian(lambda x: energy(q, k, v, x).sum(), z, create_graph=True).sum()

    zeta.requires_grad_()
    (third,) = torch.autograd.grad(curvature(zeta), zeta)
    m1, m2, m3 = (moment(q, k, v, n).reshape(2, 1, 2, 1) for n in (1, 2, 3))
    assert_close(third, m3 - 3 * m2 * m1 + 2 * m1**3, **EXACT)
    assert (third - m3).abs().max() > 0.1, "the moment is another number"


def test_partition_function_is_the_series_of_its_moments():
    """Eq. 21: each further term lowers the error by about |zeta.v|."""
    q, k, v = inputs()
    zeta = 0.05 * torch.randn(2, 2, 2, 3, dtype=torch.float64)
    ratio = torch.exp(energy(q, k, v, zeta, RANGES) - energy(q, k, v, zeta * 0, RANGES))
    errors = [
        (partition_series(q, k, v, zeta, n, RANGES) - ratio).abs().max().item() for n in range(8)
    ]
    assert all(b < a / 4 for a, b in pairwise(errors[:6]))
    assert errors[0] > 1e-3 and errors[7] < 1e-12


def test_moments_of_joined_contexts_merge_like_attention():
    q, k, v = inputs()
    parts = []
    for cut in (slice(3), slice(3, 7)):
        k_part, v_part = k[:, :, cut], v[:, :, cut]
        parts.append((moment(q, k_part, v_part, 2).flatten(3), attention(q, k_part, v_part)[1]))
    assert_close(merge(*parts)[0], moment(q, k, v, 2).flatten(3), **EXACT)


def test_moments_of_rows_without_keys_are_zero():
    q, k, v = inputs()
    none = torch.zeros(2, 2, 2, dtype=torch.int64)
    assert (moment(q, k, v, 3, none) == 0).all()


def test_output_projection_inside_the_values_gives_the_output_of_the_block():
    """Eq. 29, and its gradient form: one source in the embedding, of which all heads' energies are
    summed (Eq. 27)."""
    q, k, v = inputs(heads=4, kv_heads=2)
    k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    w_o = torch.randn(4, 3, 6, dtype=torch.float64)
    o, _ = attention(q, k, v)
    block = o.transpose(1, 2).flatten(2) @ w_o.flatten(0, 1)
    folded = fold_output_projection(v, w_o)
    assert_close(attention(q, k, folded)[0].sum(1), block, **EXACT)

    zeta = torch.zeros(2, 1, 2, 6, dtype=torch.float64, requires_grad=True)
    total = energy(q, k, folded, zeta.expand(-1, 4, -1, -1)).sum()
    (gradient,) = torch.autograd.grad(total, zeta)
    assert_close(gradient[:, 0], block, **EXACT)


def test_folded_values_merge_over_shards():
    q, k, v = inputs(heads=2, kv_heads=2)
    folded = fold_output_projection(v, torch.randn(2, 3, 6, dtype=torch.float64))
    lower, upper = (
        attention(q, k[:, :, cut], folded[:, :, cut]) for cut in (slice(2), slice(2, 7))
    )
    assert_close(merge(lower, upper), attention(q, k, folded), **EXACT)
    assert math.isfinite(lower[0].sum())
