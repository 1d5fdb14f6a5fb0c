# SPDX-License-Identifier: BSD-3-Clause
"""Reversible layers: inputs from outputs, and gradients without kept activations."""

import torch
from torch.testing import assert_close

from lab.papers.survey.reversible import (
    chunked_feed_forward,
    forward,
    inverse,
    reversible,
)

EXACT = {"rtol": 1e-12, "atol": 1e-12}
WIDTH, TOKENS, DEPTH = 8, 20, 5


def layers(seed=0):
    """Attention and a feed-forward layer in each of DEPTH layers, and all their weights."""
    generator = torch.Generator().manual_seed(seed)
    options = {"dtype": torch.float64, "generator": generator}
    weights, functions = [], []
    for _ in range(DEPTH):
        w, up = torch.randn(3, WIDTH, WIDTH, **options), torch.randn(WIDTH, 32, **options)
        down = torch.randn(32, WIDTH, **options)
        own = [(x / x.shape[-2] ** 0.5).requires_grad_() for x in (w, up, down)]

        def attention(x, own=own):
            q, k, v = (x @ one for one in own[0])
            return (q @ k.mT / WIDTH**0.5).softmax(-1) @ v

        def feed_forward(x, own=own):
            return torch.relu(x @ own[1]) @ own[2]

        weights += own
        functions.append((attention, feed_forward))
    x = torch.randn(2, 2, TOKENS, WIDTH, **options)
    return functions, weights, tuple(one.clone().requires_grad_() for one in x)


def plain(x, functions):
    for f, g in functions:
        x = forward(x, f, g)
    return x


def test_inputs_follow_from_outputs():
    functions, _, x = layers()
    y = plain(x, functions)
    assert (y[0] - x[0]).abs().max() > 1
    for f, g in reversed(functions):
        y = inverse(y, f, g)
    assert_close(y, x, **EXACT)


def test_gradients_are_those_of_kept_activations():
    functions, weights, x = layers()
    cotangents = torch.randn(2, 2, TOKENS, WIDTH, dtype=torch.float64)
    expected = torch.autograd.grad(plain(x, functions), (*x, *weights), tuple(cotangents))
    y = reversible(x, functions, weights)
    assert_close(y, plain(x, functions), **EXACT)
    found = torch.autograd.grad(y, (*x, *weights), tuple(cotangents))
    assert_close(found, expected, **EXACT)


def kept(run):
    """Numbers that autograd keeps for the backward pass, beside the weights."""
    functions, weights, x = layers()
    fixed = {one.data_ptr() for one in weights}
    found = {}

    def pack(one):
        if one.data_ptr() not in fixed:
            found[one.data_ptr()] = one
        return one

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one):
        y = run(x, functions, weights)
    assert y[0].requires_grad
    return sum(one.numel() for one in found.values())


def test_only_the_last_outputs_are_kept():
    assert kept(reversible) == 2 * 2 * TOKENS * WIDTH
    assert kept(lambda x, functions, _: plain(x, functions)) > 2 * DEPTH * 2 * TOKENS * WIDTH


def test_feed_forward_in_chunks():
    functions, _, x = layers()
    widths = []

    def counted(part):
        widths.append(part.shape[-2])
        return functions[0][1](part)

    assert_close(chunked_feed_forward(x[0], counted, 3), functions[0][1](x[0]), **EXACT)
    assert widths == [7, 7, 6]
