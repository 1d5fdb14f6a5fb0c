# SPDX-License-Identifier: BSD-3-Clause
"""Fewer keys than tokens: projected ones (Linformer) and pooled ones (compressed attention).

Either way the new keys and values are linear in those of the tokens, and attention to them is
softmax over a set of keys like any other.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..algorithms.tree import all_reduce
from . import REFERENCE, Operators


class Projected(NamedTuple):
    """What one rank has: its tokens' keys and values, and its columns of both projections."""

    k: Tensor  # [batch, heads, local length, head_dim]
    v: Tensor  # [batch, heads, local length, head_dim_v]
    e: Tensor  # [..., rank of the projection, local length], for keys
    f: Tensor  # of the same shape, for values


def low_rank_attention(
    q: Tensor, shards: Sequence[Projected], operators: Operators = REFERENCE
) -> tuple[Tensor, Tensor]:
    """`softmax(q (E k)^T / sqrt(d)) F v` (Linformer, arXiv:2006.04768, Eq. 7).

    `E k` and `F v` are sums over tokens, so ranks reduce them over a tree, once for all queries.
    No query can be causal, as every projected key has a part of every token.
    """
    k = all_reduce([part.e @ part.k for part in shards], torch.add)
    v = all_reduce([part.f @ part.v for part in shards], torch.add)
    return operators.attend(q, k, v)


def averages(tokens: int, stride: int) -> Tensor:
    """The projection `[ceil(tokens / stride), tokens]` to averages of `stride` neighbours."""
    of_token = torch.arange(tokens) // stride
    weights = (of_token == torch.arange(-(-tokens // stride))[:, None]).double()
    return weights / weights.sum(-1, keepdim=True)


def pool(x: Tensor, weight: Tensor) -> Tensor:
    """A convolution without overlap: every `stride` tokens become one.

    Tokens after the last full stride wait until it is full.

    Args:
        x: `[batch, heads, tokens, head_dim]`.
        weight: `[heads, stride, head_dim, head_dim]`.
    """
    stride = weight.shape[1]
    full = x[:, :, : x.shape[2] // stride * stride].unflatten(2, (-1, stride))
    return torch.einsum("bhnsd,hsde->bhne", full, weight)


def pooled_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight_k: Tensor,
    weight_v: Tensor,
    *,
    causal: bool = False,
    operators: Operators = REFERENCE,
) -> tuple[Tensor, Tensor]:
    """Memory-compressed attention (arXiv:1801.10198, where the stride is 3).

    A causal query sees the pooled keys whose tokens it may all see, the first ones none.
    """
    ranges = None
    if causal:
        ends = torch.arange(1, q.shape[2] + 1) // weight_k.shape[1]
        ranges = torch.stack([torch.zeros_like(ends), ends], dim=-1).int().expand(len(q), -1, -1)
    return operators.attend(q, pool(k, weight_k), pool(v, weight_v), ranges)
