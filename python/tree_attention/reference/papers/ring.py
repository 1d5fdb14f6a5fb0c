# SPDX-License-Identifier: BSD-3-Clause
"""Ring Attention (arXiv:2310.01889) over a list of ranks, as Tree Attention's section 6 compares.

The shards travel around a logical ring while the queries stay. In decoding every rank has the same
queries; in training and in a prompt each has some of its own.
"""

from collections.abc import Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from tree_attention.reference.attention import attention, merge
from tree_attention.reference.counts import Counts
from tree_attention.reference.papers.tree import Shard

T = TypeVar("T")

# The ranges of the keys of each rank's shard that the queries of each rank see, by rank of the
# queries, then of the keys: [batch, seqlen_q, 2] in local keys. None: all keys.
Ranges = Sequence[Sequence[Tensor | None]] | None


def rotate(held: Sequence[T], counts: Counts | None = None) -> list[T]:
    """One step of the ring: every rank sends what it holds to the next one."""
    if counts is not None:
        counts.steps += 1
        for rank, content in enumerate(held):
            counts.message(rank, content)
    return [held[-1], *held[:-1]]


def ring_steps(shards: Sequence[T], counts: Counts | None = None) -> Iterator[list[T]]:
    """Yield what each rank holds in each of `world_size` steps, with a rotation between two."""
    held = list(shards)
    for step in range(len(shards)):
        if step:
            held = rotate(held, counts)
        yield held


def ranges_of(ranges: Ranges, query_rank: int, key_rank: int) -> Tensor | None:
    return None if ranges is None else ranges[query_rank][key_rank]


def ring_attention(
    queries: Sequence[Tensor],
    shards: Sequence[Shard],
    key_ranges: Ranges = None,
    *,
    softmax_scale: float | None = None,
    counts: Counts | None = None,
) -> list[tuple[Tensor, Tensor]]:
    """Attends to one shard after another as they pass, and merges.

    Args:
        queries: `[batch, num_heads_q, seqlen_q, head_dim]` of each rank.
        shards: keys and values of each rank; `key_ranges` holds in place of theirs.

    Returns:
        o and lse of each rank's queries.
    """
    world_size = len(shards)
    states = [
        (
            q.new_zeros(*q.shape[:-1], shard.v.shape[-1], dtype=torch.float64),
            q.new_full(q.shape[:-1], -torch.inf, dtype=torch.float64),
        )
        for q, shard in zip(queries, shards, strict=True)
    ]
    for step, held in enumerate(ring_steps(shards, counts)):
        for rank, q in enumerate(queries):
            ranges = ranges_of(key_ranges, rank, (rank - step) % world_size)
            k, v, _ = held[rank]
            local = attention(q, k, v, ranges, softmax_scale=softmax_scale)
            states[rank] = merge(states[rank], local)
    return states
