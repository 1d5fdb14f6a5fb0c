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

from tree_attention.reference import merge_states

from . import tree
from .energy import finite, mask_scores
from .tree import Ranges, Reduce, Shard, all_reduce


def merge_states_with_gradient(o_parts: Tensor, lse_parts: Tensor) -> tuple[Tensor, Tensor]:
    """`merge_states` in float64, differentiable in both arguments.

    With the weight `w_r = exp(lse_r - lse)` of part r, the gradients are `do_r = w_r do` and
    `dlse_r = w_r (dlse + do.(o_r - o))`. A part with `lse = -inf` gets no gradient, and its o may
    be anything.
    """
    o, lse = merge_states(o_parts.detach(), lse_parts.detach())

    def backward(grad_o: Tensor, grad_lse: Tensor) -> tuple[Tensor, Tensor]:
        weights = torch.exp(lse_parts - finite(lse))
        grad_lse_parts = weights * (grad_lse + (grad_o * (o_parts - o)).sum(-1))
        # Selected, since the o of a part without keys may be NaN.
        return weights[..., None] * grad_o, grad_lse_parts.masked_fill(lse_parts == -torch.inf, 0)

    return _WithBackward.apply(backward, (o, lse), o_parts, lse_parts)


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
    with torch.no_grad():
        state = tree.tree_attention(q, shards, softmax_scale=scale, reduce=reduce)

    def backward(*grad_state: Tensor) -> tuple[Tensor, ...]:
        gradients = [
            attention_gradient(q, k, v, ranges, scale, state, grad_state) for k, v, ranges in shards
        ]
        grad_q = reduce([of_queries for of_queries, _, _ in gradients], torch.add)
        return grad_q, *(x for _, *own in gradients for x in own)

    keys_and_values = (x for k, v, _ in shards for x in (k, v))
    return _WithBackward.apply(backward, state, q, *keys_and_values)


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
    with torch.no_grad():
        states = tree.ring_attention(queries, shards, key_ranges, softmax_scale=scale)

    def backward(*grad_states: Tensor) -> tuple[Tensor, ...]:
        grad_queries = [torch.zeros_like(q) for q in queries]
        # What travels: a shard and the gradients that it has gathered so far.
        held = [(k, v, torch.zeros_like(k), torch.zeros_like(v)) for k, v, _ in shards]
        for step in range(len(held)):
            for rank, (k, v, grad_k, grad_v) in enumerate(held):
                ranges = key_ranges[rank][(rank - step) % len(held)] if key_ranges else None
                own = grad_states[2 * rank : 2 * rank + 2]
                of_q, of_k, of_v = attention_gradient(
                    queries[rank], k, v, ranges, scale, states[rank], own
                )
                grad_queries[rank] += of_q
                held[rank] = k, v, grad_k + of_k, grad_v + of_v
            held = tree.rotate(held)  # the last rotation brings the gradients home
        return *grad_queries, *(x for _, _, *own in held for x in own)

    keys_and_values = (x for k, v, _ in shards for x in (k, v))
    results = tuple(x for state in states for x in state)
    flat = _WithBackward.apply(backward, results, *queries, *keys_and_values)
    return list(zip(flat[::2], flat[1::2], strict=True))


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
    grad_state: tuple[Tensor, ...],
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v from some of the keys.

    Args:
        state: o and lse over all keys, wherever they are; so the parts of several shards add up.
        grad_state: the gradients of the loss by o and lse.
    """
    (o, lse), (grad_o, grad_lse) = state, grad_state
    group_size = q.shape[1] // k.shape[1]
    k_all, v_all = (x.repeat_interleave(group_size, dim=1) for x in (k, v))
    scores = mask_scores(scale * (q @ k_all.mT), key_ranges)
    weights = torch.exp(scores - finite(lse)[..., None])
    delta = (grad_o * o).sum(-1) - grad_lse
    grad_scores = weights * (grad_o @ v_all.mT - delta[..., None])
    grad_k, grad_v = (
        x.unflatten(1, (-1, group_size)).sum(2)
        for x in (scale * (grad_scores.mT @ q), weights.mT @ grad_o)
    )
    return scale * (grad_scores @ k_all), grad_k, grad_v


class _WithBackward(Function):
    """Results that were computed from tensors, with a function that takes gradients back."""

    @staticmethod
    def forward(
        ctx: Any,
        backward: Callable[..., tuple[Tensor, ...]],
        results: tuple[Tensor, ...],
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.by_hand = backward
        return tuple(x.clone() for x in results)  # of which `backward` has others: no cycle

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.by_hand(*gradients)
