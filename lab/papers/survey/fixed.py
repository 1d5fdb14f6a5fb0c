# SPDX-License-Identifier: BSD-3-Clause
"""Fixed patterns that differ by head: blockwise, strided and axial attention.

The survey calls the last two combinations: half of the heads take one pattern, half another. They
are one call over `patterns.by_head`, whose heads are sequences with ranges of their own.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tree_attention import patterns

from . import REFERENCE, Operators


def attend_by_head(
    q: Tensor, k: Tensor, v: Tensor, ranges: Sequence[Tensor], operators: Operators = REFERENCE
) -> tuple[Tensor, Tensor]:
    """o and lse where each kv head has ranges of its own."""
    o, lse = operators.attend(*patterns.by_head(q, k, v, ranges))
    return o.reshape(*q.shape[:3], -1), lse.reshape(q.shape[:3])


def blockwise(slots: Tensor, size: int, permutation: Sequence[int]) -> Tensor:
    """Block i of queries sees block `permutation[i]` of keys (BlockBERT, arXiv:1911.02972).

    Each head has a permutation of its own; the identity is local attention. Both directions.
    """
    begins = torch.tensor(permutation)[slots // size] * size
    return torch.stack([begins, begins + size], dim=-1).int()[:, :, None]


def strided(slots: Tensor, stride: int, num_heads_kv: int) -> list[Tensor]:
    """Half of the heads see a window, half every `stride`-th slot (Sparse Transformers,
    arXiv:1904.10509, section 4.3)."""
    count = -(-int(slots.max() + 1) // stride)
    local = patterns.window(slots, stride)
    far = patterns.dilated(slots, count, dilation=stride)
    return [local if head < num_heads_kv // 2 else far for head in range(num_heads_kv)]


def axial(slots: Tensor, width: int, num_heads_kv: int) -> list[Tensor]:
    """Half of the heads see the query's row of a picture, half its column, up to the query itself.

    Slots are pixels, row by row (Axial Transformers, arXiv:1912.12180, section 3; there a layer
    takes one axis, in the survey's words a combination of patterns).
    """
    count = int(slots.max()) // width + 1
    row, column = patterns.block(slots, width), patterns.dilated(slots, count, dilation=width)
    return [row if head < num_heads_kv // 2 else column for head in range(num_heads_kv)]
