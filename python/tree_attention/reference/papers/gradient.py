# SPDX-License-Identifier: BSD-3-Clause
"""Gradients through the merge and through attention over shards, for those who train.

These functions are differentiable in float64, with backward passes written by hand. The gradients
of the scores are FlashAttention-2's (arXiv:2307.08691, Algorithm 2): `P = exp(S - lse)`,
`dV = P^T dO` and `dS = P (dO V^T - delta)` with `delta = do.o - dlse`, where the paper, which
returns no lse, has no dlse.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from tree_attention.reference.attention import merge_states
from tree_attention.reference.papers.energy import finite, mask_scores
from tree_attention.reference.papers.tree import (
    Ranges,
    Reduce,
    Shard,
    all_reduce,
    ranges_of,
    ring_attention,
    rotate,
    tree_attention,
)


def merge_states_with_gradient(o_parts: Tensor, lse_parts: Tensor) -> tuple[Tensor, Tensor]:
    """`merge_states` in float64, differentiable in both arguments.

    With the weight `w_r = exp(lse_r - lse)` of part r, the gradients are `do_r = w_r do` and
    `dlse_r = w_r (dlse + do.(o_r - o))`. A part with `lse = -inf` gets no gradient, and its o may
    be anything.
    """
    return _MergeStates.apply(o_parts, lse_parts)


def tree_attention_with_gradient(
    q: Tensor,
    shards: Sequence[Shard],
    *,
    softmax_scale: float | None = None,
    reduce: Reduce = all_reduce,
) -> tuple[Tensor, Tensor]:
    """`tree.tree_attention`, differentiable in q and in the keys and values of all shards.

    With the o and lse of the whole, every rank computes the gradients of its own keys and values
    and a part of that of the queries, which one more reduction sums.

    Args:
        reduce: `process_reduce(group)` where each process holds one shard. o and lse are then on
            every rank, and so must be the loss: every rank gets the whole gradient of q.
    """
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    ranges = [shard.key_ranges for shard in shards]
    tensors = [x for shard in shards for x in (shard.k, shard.v)]
    return _TreeAttention.apply(scale, ranges, reduce, q, *tensors)


def ring_attention_with_gradient(
    queries: Sequence[Tensor],
    shards: Sequence[Shard],
    key_ranges: Ranges = None,
    *,
    softmax_scale: float | None = None,
) -> list[tuple[Tensor, Tensor]]:
    """`tree.ring_attention`, differentiable in the queries, keys and values of all ranks.

    Backward, the gradients of a shard travel the whole ring with it; those of queries stay.
    """
    scale = queries[0].shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    keys, values, _ = zip(*shards, strict=True)
    o, lse = _slices(_RingAttention.apply(scale, key_ranges, *queries, *keys, *values), 2)
    return list(zip(o, lse, strict=True))


def process_reduce(group: dist.ProcessGroup | None = None) -> Reduce:
    """The collective of `torch.distributed` for `tree_attention` where a process is one rank."""
    operations = {torch.maximum: dist.ReduceOp.MAX, torch.add: dist.ReduceOp.SUM}

    def reduce(parts: Sequence[Tensor], combine: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        (part,) = parts
        total = part.clone()
        dist.all_reduce(total, operations[combine], group=group)
        return total

    return reduce


def attention_gradient(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_ranges: Tensor | None,
    scale: float,
    state: tuple[Tensor, Tensor],
    state_gradient: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v from some of the keys.

    Args:
        state: o and lse over all keys, wherever they are; so the parts of several shards add up.
        state_gradient: the gradients of the loss by o and lse.
    """
    (o, lse), (grad_o, grad_lse) = state, state_gradient
    num_heads_kv, group_size = k.shape[1], q.shape[1] // k.shape[1]
    k_all, v_all = (x.repeat_interleave(group_size, dim=1) for x in (k, v))
    scores = mask_scores(scale * (q @ k_all.mT), key_ranges)
    weights = torch.exp(scores - finite(lse)[..., None])
    delta = (grad_o * o).sum(-1) - grad_lse
    grad_scores = weights * (grad_o @ v_all.mT - delta[..., None])
    grad_k, grad_v = (
        x.unflatten(1, (num_heads_kv, group_size)).sum(2)
        for x in (scale * (grad_scores.mT @ q), weights.mT @ grad_o)
    )
    return scale * (grad_scores @ k_all), grad_k, grad_v


def _slices(tensors: Sequence[Tensor], count: int) -> list[Sequence[Tensor]]:
    """Splits into `count` slices of one tensor for each rank."""
    ranks = len(tensors) // count
    return [tensors[i * ranks : (i + 1) * ranks] for i in range(count)]


class _MergeStates(Function):
    @staticmethod
    def forward(ctx: Any, o_parts: Tensor, lse_parts: Tensor) -> tuple[Tensor, Tensor]:
        o, lse = merge_states(o_parts, lse_parts)
        ctx.save_for_backward(o_parts, lse_parts, o, lse)
        return o, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_o: Tensor, grad_lse: Tensor) -> tuple[Tensor, Tensor]:
        o_parts, lse_parts, o, lse = ctx.saved_tensors
        weights = torch.exp(lse_parts - finite(lse))
        grad_lse_parts = weights * (grad_lse + (grad_o * (o_parts - o)).sum(-1))
        # Selected, since the o of a part without keys may be NaN.
        empty = lse_parts == -torch.inf
        return weights[..., None] * grad_o, grad_lse_parts.masked_fill(empty, 0)


class _TreeAttention(Function):
    @staticmethod
    def forward(
        ctx: Any,
        scale: float,
        ranges: Sequence[Tensor | None],
        reduce: Reduce,
        q: Tensor,
        *tensors: Tensor,
    ) -> tuple[Tensor, Tensor]:
        shards = [Shard(*x) for x in zip(tensors[::2], tensors[1::2], ranges, strict=True)]
        o, lse = tree_attention(q, shards, softmax_scale=scale, reduce=reduce)
        ctx.save_for_backward(o, lse, q, *tensors)
        ctx.scale, ctx.ranges, ctx.reduce = scale, ranges, reduce
        return o, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_o: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:
        o, lse, q, *tensors = ctx.saved_tensors
        gradients = [
            attention_gradient(q, k, v, ranges, ctx.scale, (o, lse), (grad_o, grad_lse))
            for k, v, ranges in zip(tensors[::2], tensors[1::2], ctx.ranges, strict=True)
        ]
        grad_q = ctx.reduce([of_queries for of_queries, _, _ in gradients], torch.add)
        own = [x for _, grad_k, grad_v in gradients for x in (grad_k, grad_v)]
        return None, None, None, grad_q, *own


class _RingAttention(Function):
    @staticmethod
    def forward(ctx: Any, scale: float, key_ranges: Ranges, *tensors: Tensor) -> tuple[Tensor, ...]:
        queries, keys, values = _slices(tensors, 3)
        shards = [Shard(*kv) for kv in zip(keys, values, strict=True)]
        states = ring_attention(queries, shards, key_ranges, softmax_scale=scale)
        o, lse = zip(*states, strict=True)
        ctx.save_for_backward(*o, *lse, *tensors)
        ctx.scale, ctx.key_ranges = scale, key_ranges
        return *o, *lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *state_gradients: Tensor) -> tuple[Tensor | None, ...]:
        o, lse, queries, keys, values = _slices(ctx.saved_tensors, 5)
        states = list(zip(o, lse, strict=True))
        gradients_of_states = list(zip(*_slices(state_gradients, 2), strict=True))
        grad_queries = [torch.zeros_like(q) for q in queries]
        # What travels: a shard and the gradients that it has gathered so far.
        held = [(*kv, *map(torch.zeros_like, kv)) for kv in zip(keys, values, strict=True)]
        for step in range(len(held)):
            for rank, (k, v, grad_k, grad_v) in enumerate(held):
                ranges = ranges_of(ctx.key_ranges, rank, (rank - step) % len(held))
                state, state_gradient = states[rank], gradients_of_states[rank]
                gradients = attention_gradient(
                    queries[rank], k, v, ranges, ctx.scale, state, state_gradient
                )
                grad_queries[rank] += gradients[0]
                held[rank] = k, v, grad_k + gradients[1], grad_v + gradients[2]
            held = rotate(held)  # the last rotation brings the gradients home
        _, _, grad_keys, grad_values = zip(*held, strict=True)
        return None, None, *grad_queries, *grad_keys, *grad_values
