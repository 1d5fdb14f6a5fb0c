# SPDX-License-Identifier: BSD-3-Clause
"""Learned patterns: keys routed to queries by k-means, and by blocks that a network sorts.

Where keys are sorted by their cluster, a cluster is a range of them, so that clusters of any sizes
are `key_ranges`.
"""

import torch
from torch import Tensor

from . import REFERENCE, Operators


def nearest(x: Tensor, centroids: Tensor) -> Tensor:
    """The centroid with the largest product for each vector of length 1: `[..., tokens]`."""
    return (torch.nn.functional.normalize(x, dim=-1) @ centroids.mT).argmax(-1)


def updated(centroids: Tensor, q: Tensor, k: Tensor, decay: float) -> Tensor:
    """The centroids after a step of online k-means (Routing Transformer, section 4.1).

    Each moves towards the sum of its queries and keys, half of each; it has length 1 again.
    """
    new = decay * centroids
    for x in (q, k):
        one_hot = torch.nn.functional.one_hot(nearest(x, centroids), len(centroids)).to(x)
        members = one_hot.mT @ torch.nn.functional.normalize(x, dim=-1)
        new = new + (1 - decay) / 2 * members
    return torch.nn.functional.normalize(new, dim=-1)


def sorted_ranges(
    groups_q: Tensor, groups_k: Tensor, *, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """The order of the keys by group, then position, and the range that each query sees in it.

    Args:
        groups_q: integers `[seqlen_q]`, the group of each query.
        groups_k: integers `[seqlen_k]`.
        causal: whether query i sees the keys up to position i only.

    Returns:
        order: `[seqlen_k]`; the sorted keys are `k[order]`.
        ranges: int32 `[seqlen_q, 2]` in sorted keys.
    """
    n = max(len(groups_q), len(groups_k))
    places, order = (groups_k * n + torch.arange(len(groups_k))).sort()
    first = groups_q * n
    end = first + torch.arange(1, len(groups_q) + 1) if causal else first + n
    bounds = torch.searchsorted(places, torch.stack([first, end], dim=-1))
    return order, bounds.int()


def routed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    centroids: Tensor,
    *,
    causal: bool = False,
    operators: Operators = REFERENCE,
) -> tuple[Tensor, Tensor]:
    """A query sees the keys with its own centroid (arXiv:2003.05997, section 4.1).

    The source takes an equal number of members for each centroid, to fill a matrix; ranges need no
    such limit. `q`, `k` and `v` are of one head, `[tokens, head_dim]`.
    """
    order, ranges = sorted_ranges(nearest(q, centroids), nearest(k, centroids), causal=causal)
    rows = (x[None, None] for x in (q, k[order], v[order]))
    o, lse = operators.attend(*rows, ranges[None])
    return o[0, 0], lse[0, 0]


def sinkhorn(scores: Tensor, steps: int) -> Tensor:
    """A nearly doubly stochastic matrix (Sinkhorn Transformer, arXiv:2002.11296).

    `exp(scores)` whose rows, then columns are divided by their sums, `steps` times, in logarithms.
    """
    for _ in range(steps):
        scores = scores - scores.logsumexp(-1, keepdim=True)
        scores = scores - scores.logsumexp(-2, keepdim=True)
    return scores.exp()


def sort_blocks(x: Tensor, weights: Tensor) -> Tensor:
    """Block i as the mixture of the blocks j with `weights[i, j]`; a permutation sorts them.

    Args:
        x: `[batch, heads, tokens, head_dim]`, where the number of blocks divides the tokens.
        weights: `[batch, heads, blocks, blocks]`.
    """
    blocks = x.unflatten(2, (weights.shape[-1], -1))
    return torch.einsum("bhij,bhjnd->bhind", weights, blocks).flatten(2, 3)


def sorted_block_attention(
    q: Tensor, k: Tensor, v: Tensor, weights: Tensor, operators: Operators = REFERENCE
) -> tuple[Tensor, Tensor]:
    """A query sees its own block and the one that was sorted to its place.

    They are two sets of keys here, each a range, and their states are merged.
    """
    tokens, blocks = q.shape[2], weights.shape[-1]
    begins = torch.arange(tokens) // (tokens // blocks) * (tokens // blocks)
    ranges = torch.stack([begins, begins + tokens // blocks], dim=-1).int().expand(len(q), -1, -1)
    moved = (sort_blocks(x, weights) for x in (k, v))
    return operators.attend_to_all((q, k, v, ranges), (q, *moved, ranges))
