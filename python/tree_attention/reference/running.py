# SPDX-License-Identifier: BSD-3-Clause
"""The running softmax: a partial state before its division, as a worker keeps it in its loop.

For the scores `s_a` of some keys, a state is their largest score m, the sum of `exp(s_a - m)` and
that of `exp(s_a - m) v_a`. LeanAttention (arXiv:2405.10480, section IV-A) proves that its merge,
"softmax re-scaling", is associative. `(o, lse)`, which `merge` and everything that crosses ranks
take, is the same state after its division.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from tree_attention.reference.papers.energy import finite, largest_score


class State(NamedTuple):
    """A partial state; the leading axes, such as batch and heads, are those of the queries."""

    largest: Tensor  # [..., seqlen_q], the largest score; -inf without keys
    denominator: Tensor  # [..., seqlen_q], in [1, number of keys]; 0 without keys
    numerator: Tensor  # [..., seqlen_q, head_dim_v]


def empty_state(q: Tensor, v: Tensor) -> State:
    """The state of no keys, for queries `q` and values of the width and dtype of `v`."""
    rows = q.shape[:-1]
    return State(v.new_full(rows, -torch.inf), v.new_zeros(rows), v.new_zeros(*rows, v.shape[-1]))


def add_tile(state: State, q: Tensor, k: Tensor, v: Tensor, scale: float) -> State:
    """Adds the keys `k` and values `v` of one tile: the body of FlashAttention-2's inner loop.

    LeanAttention prints it as lines 12 to 17 of Algorithm 1 and lines 20 to 25 of Algorithm 3, both
    without the scale.
    """
    scores = scale * (q @ k.mT)
    largest = torch.maximum(state.largest, largest_score(scores))
    weights = torch.exp(scores - finite(largest)[..., None])
    kept = torch.exp(state.largest - finite(largest))
    return State(
        largest,
        kept * state.denominator + weights.sum(-1),
        weights @ v + kept[..., None] * state.numerator,
    )


def rescale(a: State, b: State) -> State:
    """The state of the union of two disjoint sets of keys (LeanAttention, section IV-A)."""
    largest = torch.maximum(a.largest, b.largest)
    weight_a, weight_b = (torch.exp(x.largest - finite(largest)) for x in (a, b))
    return State(
        largest,
        weight_a * a.denominator + weight_b * b.denominator,
        weight_a[..., None] * a.numerator + weight_b[..., None] * b.numerator,
    )


def normalise(state: State) -> tuple[Tensor, Tensor]:
    """Divides, once and at the end; returns o and lse, which are 0 and -inf without keys."""
    empty = state.denominator == 0
    o = state.numerator / state.denominator.masked_fill(empty, 1)[..., None]
    return o, state.largest + state.denominator.log()
