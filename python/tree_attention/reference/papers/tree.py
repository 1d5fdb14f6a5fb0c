# SPDX-License-Identifier: BSD-3-Clause
"""Tree Attention's three algorithms over a world of ranks that is a list with a shard for each.

Each statement that loops over the shards is work that the ranks do at the same time, and each call
of `all_reduce` is one collective whose result every rank receives; nothing else crosses ranks.
Keys and values stay where they are: what travels is one number or one value vector per query row.
Shards may be uneven and empty. `tree_attention.tree_decode` is Algorithm 3 on processes, with
another exchange: it gathers the partial states and merges them in the canonical order, so that all
ranks hold the same bits.

They differ from the paper as printed (arXiv:2408.04093) in four places: scores are scaled;
Algorithm 1 returns the shift as well as the logarithm relative to it, since Algorithm 2 needs both;
an empty shard is the identity of every reduction; and lse has the shape of the output's rows, so
that batches of more than one sequence are right.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from tree_attention.reference.attention import attention
from tree_attention.reference.counts import Counts
from tree_attention.reference.papers.energy import finite, largest_score, tilted_scores

T = TypeVar("T")
# What reduces a tensor over all ranks: the parts of the ranks that are here, and max or sum.
Reduce = Callable[[Sequence[Tensor], Callable[[Tensor, Tensor], Tensor]], Tensor]


class Shard(NamedTuple):
    """The part of the cache that one rank holds."""

    k: Tensor  # [batch, num_heads_kv, local length, head_dim]
    v: Tensor  # [batch, num_heads_kv, local length, head_dim_v]
    key_ranges: Tensor | None = None  # [batch, seqlen_q, 2] in local keys; None: all keys


def all_reduce(
    parts: Sequence[T],
    combine: Callable[[T, T], T],
    *,
    fan_in: int = 2,
    counts: Counts | None = None,
) -> T:
    """Combines the parts of all ranks in a tree, in rank order, and gives all ranks the result.

    Groups of `fan_in` neighbours combine at their first rank, then groups of these, in
    `ceil(log(ranks) / log(fan_in))` levels; the result goes back down the same tree. With `fan_in`
    2 the order is the canonical one of `merge_states`.

    Args:
        counts: gets the two steps of each level, a message up and one down for every rank but the
            first, and the merges of the largest group of each level, which follow each other.
    """
    parts, counts, step = list(parts), counts or Counts(), 1
    links = []
    while step < len(parts):
        merges = 0
        for parent in range(0, len(parts), fan_in * step):
            children = range(parent + step, min(parent + fan_in * step, len(parts)), step)
            for child in children:
                counts.message(child, parts[child])
                parts[parent] = combine(parts[parent], parts[child])
                links.append(parent)
            merges = max(merges, len(children))
        counts.steps += 2
        counts.merges += merges
        step *= fan_in
    for parent in reversed(links):
        counts.message(parent, parts[0])
    return parts[0]


def tree_energy(q: Tensor, zeta: Tensor, shards: Sequence[Shard]) -> tuple[Tensor, Tensor]:
    """Algorithm 1: the energy F of every query row, by two reductions of one number per row.

    Returns:
        shift, relative: each `[batch, num_heads_q, seqlen_q]`, with `F = shift + relative`; 0 and
        -inf for a row without keys on any rank.
    """
    scores = [tilted_scores(q, k, v, zeta, key_ranges) for k, v, key_ranges in shards]
    shift = finite(all_reduce([largest_score(s) for s in scores], torch.maximum))
    relative = all_reduce(
        [torch.logsumexp(s - shift[..., None], dim=-1) for s in scores], torch.logaddexp
    )
    return shift, relative


def tree_gradient(q: Tensor, zeta: Tensor, shards: Sequence[Shard]) -> Tensor:
    """Algorithm 2: the gradient of the energy, by one more reduction of a value vector per row.

    At `zeta = 0` it is attention.

    Returns:
        `[batch, num_heads_q, seqlen_q, head_dim_v]`; zero for a row without keys.
    """
    shift, relative = tree_energy(q, zeta, shards)
    relative = finite(relative)
    sums = []
    for k, v, key_ranges in shards:
        scores = tilted_scores(q, k, v, zeta, key_ranges)
        weights = torch.exp(scores - shift[..., None] - relative[..., None])
        sums.append(weights @ v.repeat_interleave(q.shape[1] // v.shape[1], dim=1))
    return all_reduce(sums, torch.add)


def tree_attention(
    q: Tensor,
    shards: Sequence[Shard],
    *,
    softmax_scale: float | None = None,
    reduce: Reduce = all_reduce,
) -> tuple[Tensor, Tensor]:
    """Algorithm 3: local attention on each rank, then three reductions that merge the results.

    The reductions are the maximum of lse, the sum of the numerators and that of the denominators.

    Args:
        reduce: the collective, such as `partial(all_reduce, fan_in=4, counts=counts)`. On processes
            it gets the part of its own rank alone, and `shards` has that rank's shard.

    Returns:
        o: `[batch, num_heads_q, seqlen_q, head_dim_v]`; zero for a row without keys.
        lse: `[batch, num_heads_q, seqlen_q]`, natural logarithm; -inf for a row without keys.
    """
    states = [
        attention(q, k, v, key_ranges, softmax_scale=softmax_scale) for k, v, key_ranges in shards
    ]
    largest = reduce([lse for _, lse in states], torch.maximum)
    shift = finite(largest)
    # The shift is the largest lse, so at least one weight is 1: 1 <= denominator <= world_size.
    weights = [torch.exp(lse - shift) for _, lse in states]
    numerator = reduce(
        [o * w[..., None] for (o, _), w in zip(states, weights, strict=True)], torch.add
    )
    denominator = reduce(weights, torch.add)
    empty = largest == -torch.inf
    o = numerator / denominator.masked_fill(empty, 1)[..., None]
    return o, shift + denominator.log()
