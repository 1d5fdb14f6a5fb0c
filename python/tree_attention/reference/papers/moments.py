# SPDX-License-Identifier: BSD-3-Clause
"""The moments of the values, of which attention is the first, and the output projection inside v.

Tree Attention's Eq. 20: when key a is drawn with probability proportional to exp(score), the mean
of the product of n components of `v_a` is the n-th derivative of Z(zeta) / Z at zeta = 0, where
`Z(zeta) = exp(F(zeta))` and F is the energy. By Eq. 21 they are the coefficients of the Taylor
series of Z. The derivatives of F itself are the cumulants: its gradient is the mean and its Hessian
the covariance (`reference.papers.energy`), and the paper's section 4, which calls F the
moment generating function, means Z.
"""

from math import factorial

import torch
from torch import Tensor

from tree_attention.reference.papers.energy import energy, softmax_weights, tilted_scores


def moment(q: Tensor, k: Tensor, v: Tensor, order: int, key_ranges: Tensor | None = None) -> Tensor:
    """The mean of `v_a (x) ... (x) v_a` with `order` factors, by its definition.

    Returns:
        `[batch, num_heads_q, seqlen_q, head_dim_v, ..., head_dim_v]`; zero for a row without keys.
    """
    zeta = q.new_zeros(*q.shape[:-1], v.shape[-1])
    scores = tilted_scores(q, k, v, zeta, key_ranges)
    v = v.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    powers = torch.ones_like(v[..., 0])
    for _ in range(order):
        factor = v.reshape(*v.shape[:3], *[1] * (powers.dim() - 3), -1)
        powers = powers[..., None] * factor
    return torch.einsum("bhia,bha...->bhi...", softmax_weights(scores), powers)


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
    """`Z(zeta) / Z` up to the `order`-th term of Eq. 21, `[batch, num_heads_q, seqlen_q]`.

    It is the sum of the moments, contracted with zeta and divided by n!.
    """
    total = torch.zeros_like(zeta[..., 0])
    for n in range(order + 1):
        term = moment(q, k, v, n, key_ranges)
        for _ in range(n):
            axes = [1] * (term.dim() - 4)
            term = (term * zeta.reshape(*zeta.shape[:3], *axes, -1)).sum(-1)
        total = total + term / factorial(n)
    return total


def fold_output_projection(v: Tensor, w_o: Tensor) -> Tensor:
    """Eq. 29: values that contain the output projection, of which the heads' attention is summed.

        torch.einsum("bhie,hec->bic", attention(q, k, v)[0], w_o)
        == attention(q, k, fold_output_projection(v, w_o))[0].sum(1)

    A rank may so reduce vectors of the embedding in place of each head's. The printed shape of W_O
    and the paper's rule for barred indices do not match its product; here both have a head's rows.

    Args:
        v: `[batch, num_heads_q, seqlen_k, head_dim_v]`, for grouped heads repeated.
        w_o: `[num_heads_q, head_dim_v, embedding]`, the rows of W_O that a head's output meets.

    Returns:
        `[batch, num_heads_q, seqlen_k, embedding]`.
    """
    return torch.einsum("bhad,hde->bhae", v, w_o)
