# SPDX-License-Identifier: BSD-3-Clause
"""Attention in blocks, from chunks to FlashDecoding, with the slow-memory traffic of it.

They take `q [..., seqlen_q, head_dim]`, `k [..., seqlen_k, head_dim]` and
`v [..., seqlen_k, head_dim_v]`, whose leading axes are equal, and every query sees every key. They
return `o` and `lse` as `attention` does. A processor computes on what it has loaded from slow
memory, and `SlowMemory` counts what passes. FlashAttention-2 is arXiv:2307.08691; LeanAttention
(arXiv:2405.10480) prints it, and FlashDecoding, as well.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from tree_attention.reference import merge_states

from .energy import finite, largest_score


class State(NamedTuple):
    """The running softmax: a partial state before its division, as a worker keeps it in its loop.

    `(o, lse)`, which `merge` and everything that crosses ranks take, is the same after it. Leading
    axes, such as batch and heads, are those of the queries.
    """

    largest: Tensor  # [..., seqlen_q], the largest score; -inf without keys
    denominator: Tensor  # [..., seqlen_q], in [1, number of keys]; 0 without keys
    numerator: Tensor  # [..., seqlen_q, head_dim_v]


def tile_state(q: Tensor, k: Tensor, v: Tensor, scale: float) -> State:
    """The state of the keys `k` and values `v` of one tile."""
    scores = scale * (q @ k.mT)
    largest = largest_score(scores)
    weights = torch.exp(scores - finite(largest)[..., None])
    return State(largest, weights.sum(-1), weights @ v)


def empty_state(q: Tensor, v: Tensor) -> State:
    """The state of no keys, for queries `q` and values of the width of `v`."""
    return tile_state(q, q[..., :0, :], v[..., :0, :], 1.0)


def rescale(*states: State) -> State:
    """The state of the union of disjoint sets of keys (LeanAttention, section IV-A)."""
    largest, denominator, numerator = map(torch.stack, zip(*states, strict=True))
    weights = torch.exp(largest - finite(largest.amax(0)))
    numerator = (weights[..., None] * numerator).sum(0)
    return State(largest.amax(0), (weights * denominator).sum(0), numerator)


def normalise(state: State) -> tuple[Tensor, Tensor]:
    """Divides, once and at the end; returns o and lse, which are 0 and -inf without keys."""
    empty = state.denominator == 0
    o = state.numerator / state.denominator.masked_fill(empty, 1)[..., None]
    return o, state.largest + state.denominator.log()


class SlowMemory:
    """Counts the elements that are loaded from slow memory and stored to it."""

    def __init__(self) -> None:
        self.loaded = 0
        self.stored = 0

    @property
    def traffic(self) -> int:
        return self.loaded + self.stored

    def load(self, x: Tensor) -> Tensor:
        self.loaded += x.numel()
        return x.clone()  # a later store must not reach what was loaded

    def store(self, place: Tensor, x: Tensor) -> None:
        self.stored += x.numel()
        place.copy_(x)


def blocks(length: int, size: int) -> list[slice]:
    """The positions `[0, length)` in blocks of `size`, of which the last may be shorter."""
    return [slice(begin, min(begin + size, length)) for begin in range(0, length, size)]


def tile_by_tile(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tile_m: int,
    tile_n: int,
    combine: Callable[[list[State]], State],
) -> tuple[Tensor, Tensor]:
    """For each `tile_m` queries, `combine` of the states of no keys and of each `tile_n` keys."""
    scale = q.shape[-1] ** -0.5
    o, lse = q.new_empty(*q.shape[:-1], v.shape[-1]), q.new_empty(q.shape[:-1])
    for rows in blocks(q.shape[-2], tile_m):
        empty = empty_state(q[..., rows, :], v)
        tiles = [
            tile_state(q[..., rows, :], k[..., keys, :], v[..., keys, :], scale)
            for keys in blocks(k.shape[-2], tile_n)
        ]
        o[..., rows, :], lse[..., rows] = normalise(combine([empty, *tiles]))
    return o, lse


def chunked_attention(
    q: Tensor, k: Tensor, v: Tensor, *, query_chunk: int, key_chunk: int
) -> tuple[Tensor, Tensor]:
    """Rabe and Staats (arXiv:2112.05682): chunks of keys are summarised alone, then combined.

    Tree Attention's Eq. 1 to 3 are its sums for one key per chunk, without the largest score, which
    keeps them from overflowing.
    """
    return tile_by_tile(q, k, v, query_chunk, key_chunk, lambda states: rescale(*states))


def flash_attention_2(
    q: Tensor, k: Tensor, v: Tensor, *, block_q: int, block_k: int, memory: SlowMemory | None = None
) -> tuple[Tensor, Tensor]:
    """FlashAttention-2, whose state stays in fast memory until its only division."""
    scale, memory = q.shape[-1] ** -0.5, memory or SlowMemory()
    o, lse = q.new_empty(*q.shape[:-1], v.shape[-1]), q.new_empty(q.shape[:-1])
    for rows in blocks(q.shape[-2], block_q):
        q_i = memory.load(q[..., rows, :])
        state = empty_state(q_i, v)
        for keys in blocks(k.shape[-2], block_k):
            k_j, v_j = memory.load(k[..., keys, :]), memory.load(v[..., keys, :])
            state = rescale(state, tile_state(q_i, k_j, v_j, scale))
        o_i, lse_i = normalise(state)
        memory.store(o[..., rows, :], o_i)
        memory.store(lse[..., rows], lse_i)
    return o, lse


def flash_decoding(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    num_splits: int,
    block_q: int,
    block_k: int,
    memory: SlowMemory | None = None,
) -> tuple[Tensor, Tensor]:
    """FlashDecoding: FlashAttention-2 on a fixed number of splits, then a reduction over them.

    A split has `ceil(C_n / num_splits)` of the `C_n` key blocks, so the last ones may have fewer or
    none. The second kernel loads what the first one has stored.
    """
    memory = memory or SlowMemory()
    key_blocks = -(-k.shape[-2] // block_k)
    split = max(1, -(-key_blocks // num_splits)) * block_k
    sizes = {"block_q": block_q, "block_k": block_k}
    parts = [
        flash_attention_2(q, k[..., keys, :], v[..., keys, :], memory=memory, **sizes)
        for keys in (slice(i * split, (i + 1) * split) for i in range(num_splits))
    ]
    o_parts, lse_parts = (memory.load(torch.stack(x)) for x in zip(*parts, strict=True))
    o, lse = torch.empty_like(o_parts[0]), torch.empty_like(lse_parts[0])
    for place, x in zip((o, lse), merge_states(o_parts, lse_parts), strict=True):
        memory.store(place, x)
    return o, lse
