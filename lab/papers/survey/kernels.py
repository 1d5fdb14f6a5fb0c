# SPDX-License-Identifier: BSD-3-Clause
"""Linear attention: a similarity `phi(q).phi(k)` in place of `exp(q.k)`, so that keys add up.

    o_i = phi(q_i) S / phi(q_i).z,    S = sum_j phi(k_j) v_j^T,    z = sum_j phi(k_j)

(arXiv:2006.16236, Eq. 4 and 5.) S and z do not grow with the keys. They are sums over them, so that
a tree over shards reduces them as it reduces the numerator and the denominator of Algorithm 3, and
exactly; what is approximate is the similarity. The features are those of Linear Transformers, of
Performers (arXiv:2009.14794) and of Random Feature Attention (arXiv:2103.02143).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..algorithms.tree import Counts, all_reduce


class KernelState(NamedTuple):
    """The sums over some keys; those of disjoint keys add."""

    numerator: Tensor  # S: [..., features, head_dim_v]
    denominator: Tensor  # z: [..., features]


def add(a: KernelState, b: KernelState) -> KernelState:
    return KernelState(a.numerator + b.numerator, a.denominator + b.denominator)


def elu_features(x: Tensor) -> Tensor:
    """`elu(x) + 1`, which is positive (arXiv:2006.16236, Eq. 7)."""
    return torch.nn.functional.elu(x) + 1


def scaled(x: Tensor) -> Tensor:
    """Queries or keys such that `scaled(q).scaled(k)` is the score `q.k / sqrt(head_dim)`."""
    return x * x.shape[-1] ** -0.25


def directions(
    number: int, head_dim: int, generator: torch.Generator, *, orthogonal: bool = False
) -> Tensor:
    """Normal vectors `[number, head_dim]` in float64, `orthogonal` ones in blocks of head_dim.

    These have the same distribution each and a smaller variance together (Performers, section 2.4).
    """
    options: dict[str, Any] = {"dtype": torch.float64, "generator": generator}
    omega = torch.randn(number, head_dim, **options)
    if not orthogonal:
        return omega
    blocks = -(-number // head_dim)
    q, _ = torch.linalg.qr(torch.randn(blocks, head_dim, head_dim, **options))
    return q.flatten(0, 1)[:number] * omega.norm(dim=-1, keepdim=True)


def positive_features(x: Tensor, omega: Tensor) -> Tensor:
    """FAVOR+: `exp(w.x - |x|^2 / 2) / sqrt(m)`, whose mean product is `exp(x.y)` (Lemma 1)."""
    norm = x.square().sum(-1, keepdim=True)
    return torch.exp(x @ omega.T - norm / 2) * len(omega) ** -0.5


def trigonometric_features(x: Tensor, omega: Tensor) -> Tensor:
    """Random Fourier features with the same mean, of either sign: `exp(|x|^2 / 2) (sin, cos) w.x`.

    Random Feature Attention has them for vectors of length 1 (section 3.1); Performers' Eq. 5 with
    `h(x) = exp(|x|^2 / 2)` takes any.
    """
    norm = x.square().sum(-1, keepdim=True)
    angles = x @ omega.T
    features = torch.cat([angles.sin(), angles.cos()], dim=-1)
    return torch.exp(norm / 2) * features * len(omega) ** -0.5


def kernel_state(phi_k: Tensor, v: Tensor) -> KernelState:
    return KernelState(phi_k.mT @ v, phi_k.sum(-2))


def read(phi_q: Tensor, state: KernelState) -> Tensor:
    """o of queries over the keys of a state (Eq. 5)."""
    return phi_q @ state.numerator / (phi_q @ state.denominator[..., None])


def tree_linear_attention(
    phi_q: Tensor, shards: Sequence[tuple[Tensor, Tensor]], *, counts: Counts | None = None
) -> Tensor:
    """o over the features and values of all ranks, by one reduction over a tree.

    A message has `features * (head_dim_v + 1)` numbers for a head, however many queries there are.
    """
    states = [kernel_state(phi_k, v) for phi_k, v in shards]
    return read(phi_q, all_reduce(states, add, counts=counts))


def causal_linear_attention(phi_q: Tensor, phi_k: Tensor, v: Tensor) -> Tensor:
    """Token by token with a state that is carried along, as a recurrent network (Eq. 18 to 20)."""
    state = kernel_state(phi_k[..., :0, :], v[..., :0, :])
    outputs = []
    for i in range(v.shape[-2]):
        token = slice(i, i + 1)
        state = add(state, kernel_state(phi_k[..., token, :], v[..., token, :]))
        outputs.append(read(phi_q[..., token, :], state))
    return torch.cat(outputs, dim=-2)
