# SPDX-License-Identifier: BSD-3-Clause
"""What the survey of efficient transformers (arXiv:2009.06732) and the slides describe, in pages.

Queries, keys and values are `[batch, heads, tokens, head_dim]`, in any float dtype. What is softmax
over a set of keys goes through a pair of functions: the definitions in float64, or the operators,
which compute in float32. lab/papers/README.md has a row for each file.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

import tree_attention
from tree_attention import reference


class Operators(NamedTuple):
    attend: Callable[..., tuple[Tensor, Tensor]]
    merge: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]

    def attend_to_all(self, *parts: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """o and lse over disjoint sets of keys: each part is `q, k, v` or `q, k, v, key_ranges`."""
        states = [self.attend(*part) for part in parts]
        o, lse = (torch.stack(x) for x in zip(*states, strict=True))
        return self.merge(o, lse)


REFERENCE = Operators(reference.attention, reference.merge_states)
OURS = Operators(tree_attention.lean_decode, tree_attention.merge_states)


def causal_ranges(seqlen_q: int, batch: int = 1) -> Tensor:
    """`[0, i + 1)` for query i, as `key_ranges`."""
    ends = torch.arange(1, seqlen_q + 1, dtype=torch.int32).expand(batch, -1)
    return torch.stack([torch.zeros_like(ends), ends], dim=-1)
