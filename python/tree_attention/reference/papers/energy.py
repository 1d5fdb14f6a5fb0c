# SPDX-License-Identifier: BSD-3-Clause
"""Attention as the gradient of an energy.

Give every query row a source `zeta` in the space of values and define its energy

    F(zeta) = log sum_a exp(scale * q.k_a + zeta.v_a),    scale = head_dim ** -0.5.

F is the cumulant generating function of the value `v_a` when key `a` is drawn with probability
proportional to exp(score): its gradient at `zeta = 0` is the mean of v, which is attention, and
its Hessian is the covariance of v, hence F is convex. At any other `zeta` the gradient is attention
with the *tilted* scores `scale * q.k_a + zeta.v_a`.

Why this matters for a sharded cache: F needs only a maximum and a logarithm of a sum of
exponentials, both associative, so a tree of ranks computes it in a logarithmic number of steps,
and its gradient comes at the same cost (Tree Attention, Observation 1 and Theorem 1). The energy
of many rows and heads is the sum of theirs, and each row's source receives that row's attention;
restricted to `key_ranges` this holds for causal attention too (Tree Attention, Eq. 25 to 28).
"""

import torch
from torch import Tensor


def tilted_scores(
    q: Tensor, k: Tensor, v: Tensor, zeta: Tensor, key_ranges: Tensor | None = None
) -> Tensor:
    """The tilted scores `scale * q.k_a + zeta.v_a`, and -inf for keys that a query does not see.

    Args:
        q: `[batch, num_heads_q, seqlen_q, head_dim]`.
        k: `[batch, num_heads_kv, seqlen_k, head_dim]`.
        v: `[batch, num_heads_kv, seqlen_k, head_dim_v]`.
        zeta: `[batch, num_heads_q, seqlen_q, head_dim_v]`.
        key_ranges: `[batch, seqlen_q, 2]`, the half-open range of keys that each query sees; for
            causal attention it is `[0, i + 1)` for query i. None: all keys.

    Returns:
        `[batch, num_heads_q, seqlen_q, seqlen_k]`.
    """
    scale = q.shape[-1] ** -0.5
    group_size = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group_size, dim=1) for x in (k, v))
    return mask_scores(scale * (q @ k.mT) + zeta @ v.mT, key_ranges)


def mask_scores(scores: Tensor, key_ranges: Tensor | None) -> Tensor:
    """The scores, and -inf for the keys outside `key_ranges`."""
    if key_ranges is None:
        return scores
    j = torch.arange(scores.shape[-1], device=scores.device)
    begin, end = key_ranges[:, None, :, :1], key_ranges[:, None, :, 1:]
    return scores.masked_fill((j < begin) | (j >= end), -torch.inf)


def largest_score(scores: Tensor) -> Tensor:
    """The largest score of each row over its keys, -inf for a row without keys."""
    if scores.shape[-1] == 0:
        return scores.new_full(scores.shape[:-1], -torch.inf)
    return scores.amax(dim=-1)


def finite(shift: Tensor) -> Tensor:
    """The shift, 0 for rows without keys: no difference of two infinities, which is NaN, arises."""
    return shift.masked_fill(shift == -torch.inf, 0)


def softmax_weights(scores: Tensor) -> Tensor:
    """The weights of the keys of each row, all 0 for a row without keys."""
    empty = (scores == -torch.inf).all(dim=-1, keepdim=True)
    return torch.softmax(scores, dim=-1).masked_fill(empty, 0)


def energy(
    q: Tensor, k: Tensor, v: Tensor, zeta: Tensor, key_ranges: Tensor | None = None
) -> Tensor:
    """The energy of each query row, `[batch, num_heads_q, seqlen_q]`.

    At `zeta = 0` it is lse. The arguments are those of `tilted_scores`.
    """
    scores = tilted_scores(q, k, v, zeta, key_ranges)
    return torch.logsumexp(scores, dim=-1)


def safe_energy(
    q: Tensor, k: Tensor, v: Tensor, zeta: Tensor, key_ranges: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The energy as a sum of two parts that cannot overflow: `F = shift + relative`.

    The shift is the largest score. Automatic differentiation must see it as a constant; then
    `relative` alone has the gradient of F (Tree Attention, Eq. 35 to 38). The arguments are those
    of `tilted_scores`.

    Returns:
        shift, relative: each `[batch, num_heads_q, seqlen_q]`; 0 and -inf for a row without keys.
    """
    scores = tilted_scores(q, k, v, zeta, key_ranges)
    shift = finite(largest_score(scores).detach())
    return shift, torch.exp(scores - shift[..., None]).sum(dim=-1).log()


def energy_gradient(
    q: Tensor, k: Tensor, v: Tensor, zeta: Tensor, key_ranges: Tensor | None = None
) -> Tensor:
    """The gradient of F in zeta by its formula: for each row, the mean of v under its weights.

    The arguments are those of `tilted_scores`.

    Returns:
        `[batch, num_heads_q, seqlen_q, head_dim_v]`; zero for a row without keys.
    """
    weights = softmax_weights(tilted_scores(q, k, v, zeta, key_ranges))
    return weights @ v.repeat_interleave(q.shape[1] // k.shape[1], dim=1)


def energy_hessian(
    q: Tensor, k: Tensor, v: Tensor, zeta: Tensor, key_ranges: Tensor | None = None
) -> Tensor:
    """The Hessian of F in zeta by its formula: for each row, the covariance of v.

    The mixed derivatives for two different rows are zero and are left out. The arguments are those
    of `tilted_scores`.

    Returns:
        `[batch, num_heads_q, seqlen_q, head_dim_v, head_dim_v]`; zero for a row without keys.
    """
    weights = softmax_weights(tilted_scores(q, k, v, zeta, key_ranges))
    v = v.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    mean = weights @ v
    second_moment = torch.einsum("bhia,bhac,bhad->bhicd", weights, v, v)
    return second_moment - mean[..., :, None] * mean[..., None, :]


def attention_from_energy(
    q: Tensor, k: Tensor, v: Tensor, key_ranges: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attention by one backward pass through the energy at `zeta = 0`.

    Returns:
        o: `[batch, num_heads_q, seqlen_q, head_dim_v]`, the gradient dF/dzeta.
        lse: `[batch, num_heads_q, seqlen_q]`, the energy F; natural logarithm.
    """
    zeta = q.new_zeros(*q.shape[:-1], v.shape[-1], requires_grad=True)
    with torch.enable_grad():
        lse = energy(q, k, v, zeta, key_ranges)
        (o,) = torch.autograd.grad(lse.sum(), zeta)
    return o, lse.detach()
