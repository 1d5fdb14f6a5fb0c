# SPDX-License-Identifier: BSD-3-Clause
"""Linear attention is its definition, on shards too, and random features approach softmax."""

from itertools import pairwise
from statistics import median

import pytest
import torch
from torch.testing import assert_close

from lab.papers.algorithms.tree import Counts
from lab.papers.survey.kernels import (
    causal_linear_attention,
    directions,
    elu_features,
    kernel_state,
    positive_features,
    read,
    scaled,
    tree_linear_attention,
    trigonometric_features,
)
from tree_attention.reference import attention

EXACT = {"rtol": 1e-12, "atol": 1e-12}
TOKENS, HEAD_DIM = 60, 16


def inputs(seed=0):
    generator = torch.Generator().manual_seed(seed)
    q, k, v = torch.randn(3, 2, 3, TOKENS, HEAD_DIM, dtype=torch.float64, generator=generator)
    return q, k, v[..., :5], generator


def features(name, q, k, generator):
    if name == "elu":
        return elu_features(q), elu_features(k)
    omega = directions(24, HEAD_DIM, generator)
    of = positive_features if name == "positive" else trigonometric_features
    return of(scaled(q), omega), of(scaled(k), omega)


NAMES = pytest.mark.parametrize("name", ["elu", "positive", "trigonometric"])


def by_similarity(phi_q, phi_k, v, mask=None):
    """Eq. 3 of Linear Transformers: a matrix of similarities, divided by its sums."""
    similarity = phi_q @ phi_k.mT
    if mask is not None:
        similarity = similarity * mask
    return similarity @ v / similarity.sum(-1, keepdim=True)


@NAMES
def test_sums_are_attention_by_similarity(name):
    q, k, v, generator = inputs()
    phi_q, phi_k = features(name, q, k, generator)
    assert_close(read(phi_q, kernel_state(phi_k, v)), by_similarity(phi_q, phi_k, v), **EXACT)


@NAMES
def test_a_tree_over_uneven_shards_is_exact(name):
    q, k, v, generator = inputs()
    phi_q, phi_k = features(name, q, k, generator)
    sizes = [7, 0, 30, 1, 22]
    shards = list(zip(phi_k.split(sizes, 2), v.split(sizes, 2), strict=True))
    counts = Counts()
    o = tree_linear_attention(phi_q, shards, counts=counts)
    assert_close(o, by_similarity(phi_q, phi_k, v), **EXACT)
    assert counts.steps == 6, "up and down a tree of five ranks"
    numbers = phi_k.shape[-1] * (v.shape[-1] + 1) * q.shape[0] * q.shape[1]
    assert counts.num_bytes == counts.messages * numbers * 8


@NAMES
def test_recurrence_is_causal_attention(name):
    q, k, v, generator = inputs()
    phi_q, phi_k = features(name, q, k, generator)
    mask = torch.ones(TOKENS, TOKENS, dtype=torch.float64).tril()
    truth = by_similarity(phi_q, phi_k, v, mask)
    # Sums of either sign may nearly cancel in the denominator of the trigonometric features.
    assert_close(causal_linear_attention(phi_q, phi_k, v), truth, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("of", [positive_features, trigonometric_features])
@pytest.mark.parametrize("orthogonal", [False, True], ids=["independent", "orthogonal"])
def test_features_are_unbiased(of, orthogonal):
    """Lemma 1: their mean product is exp of the product, within five standard errors."""
    generator = torch.Generator().manual_seed(1)
    x, y = 0.3 * torch.randn(2, HEAD_DIM, dtype=torch.float64, generator=generator)
    draws = torch.stack(
        [
            of(x[None], omega)[0] @ of(y[None], omega)[0]
            for omega in (
                directions(HEAD_DIM, HEAD_DIM, generator, orthogonal=orthogonal)
                for _ in range(8000)
            )
        ]
    )
    standard_error = draws.std() / len(draws) ** 0.5
    assert abs(draws.mean() - torch.exp(x @ y)) < 5 * standard_error
    assert standard_error < 0.02


def test_orthogonal_directions():
    omega = directions(40, HEAD_DIM, torch.Generator().manual_seed(0), orthogonal=True)
    assert omega.shape == (40, HEAD_DIM)
    unit = torch.nn.functional.normalize(omega, dim=-1)
    for block in unit.split(HEAD_DIM):
        assert_close(block @ block.T, torch.eye(len(block), dtype=torch.float64), **EXACT)


def test_more_features_err_less():
    """On the median, as the features have a heavy tail: 16 times as many bring at least a half."""
    q, k, v, generator = inputs()
    q, k = q / 2, k / 2
    truth, _ = attention(q, k, v)

    def error(number):
        omega = directions(number, HEAD_DIM, generator, orthogonal=True)
        phi_q, phi_k = (positive_features(scaled(x), omega) for x in (q, k))
        o = read(phi_q, kernel_state(phi_k, v))
        return ((o - truth).norm() / truth.norm()).item()

    errors = [median(error(number) for _ in range(15)) for number in (32, 512, 8192)]
    assert all(a > 2 * b for a, b in pairwise(errors)), errors
