# SPDX-License-Identifier: BSD-3-Clause
"""Attention as the gradient of an energy, and the moments of the values, of which it is the first.

With a source `zeta` in the space of values, the energy of a query row is

    F(zeta) = log sum_a exp(scale * q.k_a + zeta.v_a),    scale = head_dim ** -0.5.

F is the cumulant generating function of the value `v_a` when key `a` is drawn with probability
proportional to exp(score): its gradient at `zeta = 0` is the mean of v, which is attention, and
its Hessian is the covariance of v. The derivatives of `Z = exp(F)` are the moments. The README
of lab/papers has the equations of Tree Attention that the functions name.
"""

from math import factorial

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
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    return mask_scores(q.shape[-1] ** -0.5 * (q @ k.mT) + zeta @ v.mT, key_ranges)


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
    """The energy of each query row, `[batch, num_heads_q, seqlen_q]`; at `zeta = 0` it is lse."""
    return torch.logsumexp(tilted_scores(q, k, v, zeta, key_ranges), dim=-1)


def safe_energy(
    q: Tensor, k: Tensor, v: Tensor, zeta: Tensor, key_ranges: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The energy as a sum of two parts that cannot overflow: `F = shift + relative`.

    The shift is the largest score. Automatic differentiation must see it as a constant; then
    `relative` alone has the gradient of F (Tree Attention, Eq. 35 to 38).

    Returns:
        shift, relative: each `[batch, num_heads_q, seqlen_q]`; 0 and -inf for a row without keys.
    """
    scores = tilted_scores(q, k, v, zeta, key_ranges)
    shift = finite(largest_score(scores).detach())
    return shift, torch.exp(scores - shift[..., None]).sum(dim=-1).log()


def moment(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    order: int,
    key_ranges: Tensor | None = None,
    zeta: Tensor | None = None,
) -> Tensor:
    """The mean of `v_a (x) ... (x) v_a` with `order` factors, by its definition.

    Args:
        zeta: tilts the scores; None: 0.

    Returns:
        `[batch, num_heads_q, seqlen_q, head_dim_v, ..., head_dim_v]`; zero for a row without keys.
    """
    if zeta is None:
        zeta = q.new_zeros(*q.shape[:-1], v.shape[-1])
    weights = softmax_weights(tilted_scores(q, k, v, zeta, key_ranges))
    v = v.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    powers = torch.ones_like(v[..., 0])
    for n in range(order):
        powers = powers[..., None] * v.reshape(*v.shape[:3], *[1] * n, -1)
    return torch.einsum("bhia,bha...->bhi...", weights, powers)


def energy_gradient(
    q: Tensor, k: Tensor, v: Tensor, zeta: Tensor, key_ranges: Tensor | None = None
) -> Tensor:
    """The gradient of F in zeta by its formula: for each row, the mean of v under its weights."""
    return moment(q, k, v, 1, key_ranges, zeta)


def energy_hessian(
    q: Tensor, k: Tensor, v: Tensor, zeta: Tensor, key_ranges: Tensor | None = None
) -> Tensor:
    """The Hessian of F in zeta by its formula: for each row, the covariance of v.

    It has the shape of `moment`: mixed derivatives for two different rows are zero, and left out.
    """
    mean, second_moment = (moment(q, k, v, order, key_ranges, zeta) for order in (1, 2))
    return second_moment - mean[..., :, None] * mean[..., None, :]


def attention_from_energy(
    q: Tensor, k: Tensor, v: Tensor, key_ranges: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attention by one backward pass at `zeta = 0`: the gradient of the energy, which is lse."""
    zeta = q.new_zeros(*q.shape[:-1], v.shape[-1], requires_grad=True)
    with torch.enable_grad():
        lse = energy(q, k, v, zeta, key_ranges)
        (o,) = torch.autograd.grad(lse.sum(), zeta)
    return o, lse.detach()


def moment_from_energy(
    q: Tensor, k: Tensor, v: Tensor, order: int, key_ranges: Tensor | None = None
) -> Tensor:
    """`moment` by Eq. 20: `order` derivatives of `Z(zeta) / Z = exp(F(zeta) - F(0))`.

    Every row must see a key. The difference of the energies keeps Z from overflowing.
    """
    zeta = q.new_zeros(*q.shape[:-1], v.shape[-1], requires_grad=True)
    with torch.enable_grad():
        value = energy(q, k, v, zeta, key_ranges)
        value = torch.exp(value - value.detach())
        for _ in range(order):
            components = value.reshape(*zeta.shape[:3], -1).unbind(-1)
            value = torch.stack(
                [torch.autograd.grad(c.sum(), zeta, create_graph=True)[0] for c in components], -2
            ).reshape(*value.shape, -1)
    return value.detach()


def partition_series(
    q: Tensor, k: Tensor, v: Tensor, zeta: Tensor, order: int, key_ranges: Tensor | None = None
) -> Tensor:
    """`Z(zeta) / Z` by Eq. 21: the sum of the moments, contracted with zeta and divided by n!."""
    total = torch.zeros_like(zeta[..., 0])
    for n in range(order + 1):
        term = moment(q, k, v, n, key_ranges)
        for axes in reversed(range(n)):
            term = (term * zeta.reshape(*zeta.shape[:3], *[1] * axes, -1)).sum(-1)
        total = total + term / factorial(n)
    return total


def fold_output_projection(v: Tensor, w_o: Tensor) -> Tensor:
    """Eq. 29: values that contain the output projection, of which the heads' attention is summed.

        torch.einsum("bhie,hec->bic", attention(q, k, v)[0], w_o)
        == attention(q, k, fold_output_projection(v, w_o))[0].sum(1)

    A rank may so reduce vectors of the embedding in place of each head's.

    Args:
        v: `[batch, num_heads_q, seqlen_k, head_dim_v]`, for grouped heads repeated.
        w_o: `[num_heads_q, head_dim_v, embedding]`, the rows of W_O that a head's output meets.

    Returns:
        `[batch, num_heads_q, seqlen_k, embedding]`.
    """
    return torch.einsum("bhad,hde->bhae", v, w_o)
