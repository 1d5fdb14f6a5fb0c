# SPDX-License-Identifier: BSD-3-Clause
"""Tree Attention's three algorithms, and the ring, over ranks that are a list of shards.

Each statement that loops over the shards is work that the ranks do at the same time, and each call
of `all_reduce` is one collective whose result every rank receives; nothing else crosses ranks.
Shards may be uneven and empty. In Ring Attention (arXiv:2310.01889), with which the paper compares,
the shards travel around a ring of ranks while the queries stay.

lab/papers/README.md has the places in which they differ from the paper as printed
(arXiv:2408.04093).
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from tree_attention.reference import attention, merge

from .energy import finite, largest_score, tilted_scores

T = TypeVar("T")
# What reduces a tensor over all ranks: the parts of the ranks that are here, and max or sum.
Reduce = Callable[[Sequence[Tensor], Callable[[Tensor, Tensor], Tensor]], Tensor]
# The ranges of the keys of each rank's shard that the queries of each rank see, by rank of the
# queries, then of the keys: [batch, seqlen_q, 2] in local keys. None: all keys.
Ranges = Sequence[Sequence[Tensor | None]] | None


class Shard(NamedTuple):
    """The part of the cache that one rank holds."""

    k: Tensor  # [batch, num_heads_kv, local length, head_dim]
    v: Tensor  # [batch, num_heads_kv, local length, head_dim_v]
    key_ranges: Tensor | None = None  # [batch, seqlen_q, 2] in local keys; None: all keys


@dataclass
class Counts:
    """Steps, messages and bytes, which the collectives that it is handed to add up."""

    steps: int = 0  # rounds of messages of which none needs another one of the same round
    merges: int = 0  # along the longest path: each waits for the one before it
    messages: int = 0
    bytes_sent: Counter[int] = field(default_factory=Counter)  # by rank

    @property
    def num_bytes(self) -> int:
        """Bytes that all ranks send together."""
        return self.bytes_sent.total()

    @property
    def busiest(self) -> int:
        """Bytes that the busiest rank sends."""
        return max(self.bytes_sent.values(), default=0)

    def message(self, source: int, content: Any) -> None:
        """Counts a tensor that is sent, or a tuple of tensors and of what is sent for nothing."""
        contents = content if isinstance(content, tuple) else (content,)
        self.messages += 1
        self.bytes_sent[source] += sum(x.nbytes for x in contents if isinstance(x, Tensor))


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
    """
    parts, links, counts, step = list(parts), [], counts or Counts(), 1
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


def tree_energy(
    q: Tensor, zeta: Tensor | Sequence[Tensor], shards: Sequence[Shard]
) -> tuple[Tensor, Tensor]:
    """Algorithm 1: `energy.safe_energy` of every row, by two reductions of one number per row.

    `zeta` may be the copy of each rank, as line 2 scatters it.
    """
    return _energy(_scores(q, zeta, shards))


def tree_gradient(q: Tensor, zeta: Tensor, shards: Sequence[Shard]) -> Tensor:
    """Algorithm 2: `energy.energy_gradient`, by one more reduction of a value vector per row."""
    scores = _scores(q, zeta, shards)
    shift, relative = _energy(scores)
    log_sum = shift + finite(relative)
    sums = [
        torch.exp(s - log_sum[..., None]) @ v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)
        for s, (_, v, _) in zip(scores, shards, strict=True)
    ]
    return all_reduce(sums, torch.add)


def _scores(q: Tensor, zeta: Tensor | Sequence[Tensor], shards: Sequence[Shard]) -> list[Tensor]:
    copies = [zeta] * len(shards) if isinstance(zeta, Tensor) else zeta
    return [
        tilted_scores(q, k, v, copy, key_ranges)
        for (k, v, key_ranges), copy in zip(shards, copies, strict=True)
    ]


def _energy(scores: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    # A constant to automatic differentiation (Eq. 35 to 38).
    shift = finite(all_reduce([largest_score(s.detach()) for s in scores], torch.maximum))
    parts = [torch.logsumexp(s - shift[..., None], dim=-1) for s in scores]
    return shift, all_reduce(parts, torch.logaddexp)


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
        o and lse of `attention` to all shards.
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
        queries: `[batch, num_heads_q, seqlen_q, head_dim]` of each rank: in decoding the same on
            all of them, in training and in a prompt each rank's own.
        shards: keys and values of each rank; `key_ranges` holds in place of theirs.

    Returns:
        o and lse of each rank's queries.
    """
    states: list[tuple[Tensor, Tensor]] = []
    for step, held in enumerate(ring_steps(shards, counts)):
        for rank, q in enumerate(queries):
            ranges = key_ranges[rank][(rank - step) % len(shards)] if key_ranges else None
            k, v, _ = held[rank]
            local = attention(q, k, v, ranges, softmax_scale=softmax_scale)
            if step:
                states[rank] = merge(states[rank], local)
            else:
                states.append(local)
    return states
