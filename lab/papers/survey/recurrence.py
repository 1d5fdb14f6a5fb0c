# SPDX-License-Identifier: BSD-3-Clause
"""Recurrence over segments: Transformer-XL and Compressive Transformer.

They are arXiv:1901.02860 and arXiv:1911.05507. A segment's tokens attend to the tokens before them
in the segment and to a memory: what the same layer was given in earlier segments. These are
disjoint sets of keys, whose states are merged, with a third one for what has left the memory and is
kept compressed. A layer is attention and a residual connection here: everything else in it is token
by token. Positions are left out.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from . import REFERENCE, Operators, causal_ranges


class Layer(NamedTuple):
    """The weights of a layer, each `[heads, width, head_dim]`; w_o `[heads, head_dim, width]`."""

    w_q: Tensor
    w_k: Tensor
    w_v: Tensor
    w_o: Tensor


class Memory(NamedTuple):
    """What a layer has kept of its inputs, `[batch, tokens, width]` each."""

    recent: Tensor
    compressed: Tensor  # averages, oldest first


def project(x: Tensor, weight: Tensor) -> Tensor:
    return torch.einsum("bnw,hwd->bhnd", x, weight)


def keys_and_values(x: Tensor, layer: Layer) -> tuple[Tensor, Tensor]:
    return project(x, layer.w_k), project(x, layer.w_v)


def attend_with_memory(
    x: Tensor, memory: Memory, layer: Layer, operators: Operators = REFERENCE
) -> Tensor:
    """The layer's output for a segment `[batch, tokens, width]` (Transformer-XL, section 3.2)."""
    q = project(x, layer.w_q)
    own = (q, *keys_and_values(x, layer), causal_ranges(x.shape[1], len(x)))
    before = [(q, *keys_and_values(kept, layer)) for kept in memory if kept.shape[1]]
    o, _ = operators.attend_to_all(*before, own)
    return x + torch.einsum("bhnd,hdw->bnw", o, layer.w_o)


def remember(memory: Memory, x: Tensor, length: int, rate: int) -> Memory:
    """The memory after a segment: its last `length` tokens, and averages of `rate` older ones.

    The inputs are detached, so that no gradient passes into an earlier segment. With `rate` 0 older
    tokens are forgotten (Transformer-XL); else `rate` divides the tokens of a segment and `length`
    (Compressive Transformer, section 3.1, with its mean pooling).
    """
    kept = torch.cat([memory.recent, x.detach()], dim=1)
    leaving = kept[:, : max(0, kept.shape[1] - length)]
    recent = kept[:, leaving.shape[1] :]
    if not rate:
        return Memory(recent, memory.compressed)
    averages = leaving.unflatten(1, (-1, rate)).mean(2)
    return Memory(recent, torch.cat([memory.compressed, averages], dim=1))


def run_segments(
    x: Tensor,
    layers: Sequence[Layer],
    *,
    segment: int,
    memory_length: int,
    rate: int = 0,
    operators: Operators = REFERENCE,
) -> Tensor:
    """The outputs of all tokens `[batch, tokens, width]`, segment after segment."""
    memories = [Memory(x[:, :0], x[:, :0]) for _ in layers]
    outputs = []
    for hidden in x.split(segment, dim=1):
        for i, layer in enumerate(layers):
            given, memory = hidden, memories[i]
            hidden = attend_with_memory(given, memory, layer, operators)
            memories[i] = remember(memory, given, memory_length, rate)
        outputs.append(hidden)
    return torch.cat(outputs, dim=1)
