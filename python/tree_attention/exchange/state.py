# SPDX-License-Identifier: BSD-3-Clause
"""The memory of an exchange: messages laid out for kernel, wire and merge, in buffers that stay."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

_MAX_STATES = 64
# Of lse behind an o of 16-bit values, and of messages in a row.
_ALIGNMENT = 4


@dataclass(frozen=True)
class Message:
    """The bytes of some rows of a state: first o, then lse, so that vectors of o stay aligned."""

    shape: tuple[int, ...]  # of lse
    head_dim: int
    dtype: torch.dtype  # of o; lse is float32

    @property
    def num_rows(self) -> int:
        return math.prod(self.shape)

    @property
    def o_bytes(self) -> int:
        size = self.num_rows * self.head_dim * self.dtype.itemsize
        return -(-size // _ALIGNMENT) * _ALIGNMENT

    @property
    def num_bytes(self) -> int:
        return self.o_bytes + 4 * self.num_rows

    def views(self, messages: Tensor) -> tuple[Tensor, Tensor]:
        """`o` and `lse` in the bytes `[..., num_bytes]` of one message or of many."""
        leading = messages.shape[:-1]
        o_size = self.num_rows * self.head_dim * self.dtype.itemsize
        o = messages[..., :o_size].view(self.dtype)
        lse = messages[..., self.o_bytes :].view(torch.float32)
        return o.view(*leading, *self.shape, self.head_dim), lse.view(*leading, *self.shape)


class Arena:
    """Named memory that never moves: captured graphs may hold its addresses."""

    def __init__(self) -> None:
        self._blocks: dict[tuple[str, torch.device], Tensor] = {}
        self.outgrown: list[Tensor] = []

    def bytes(self, name: str, num_bytes: int, device: torch.device) -> Tensor:
        """The first bytes of a block, which every user of the name shares."""
        block = self._blocks.get((name, device))
        if block is None or block.numel() < num_bytes:
            capacity = num_bytes
            if block is not None:
                self.outgrown.append(block)
                # Doubling bounds what is outgrown by what is in use.
                capacity = max(num_bytes, 2 * block.numel())
            with torch.inference_mode(False):  # or nobody could write to it outside of it
                # Zeros, as padding travels too.
                block = torch.zeros(capacity, dtype=torch.uint8, device=device)
            self._blocks[name, device] = block
        return block[:num_bytes]


@dataclass(frozen=True)
class State:
    """This rank's message, and whatever was prepared to exchange it."""

    message: Message  # of [batch, num_heads_q, seqlen_q] rows
    device: torch.device
    send: Tensor  # its bytes
    o: Tensor  # [batch, num_heads_q, seqlen_q, head_dim] in send
    lse: Tensor  # float32 [batch, num_heads_q, seqlen_q] in send
    arena: Arena
    # What strategies prepared, by their options.
    prepared: dict[Any, Callable[[float, Tensor, Tensor], None]] = field(default_factory=dict)

    def load(self, o: Tensor, lse: Tensor) -> None:
        self.o.copy_(o)
        self.lse.copy_(lse)

    def buffer(self, name: str, num_bytes: int) -> Tensor:
        return self.arena.bytes(name, num_bytes, self.device)

    def parts(self, num_parts: int) -> tuple[Tensor, Tensor, Tensor]:
        """Room for `num_parts` such messages: bytes `[num_parts, ...]` and views of o and lse."""
        num_bytes = self.message.num_bytes
        messages = self.buffer("parts", num_parts * num_bytes).view(num_parts, num_bytes)
        return messages, *self.message.views(messages)


class StateBuffers:
    """States of any shape, in memory that they share."""

    def __init__(self) -> None:
        self.arena = Arena()
        self._states: dict[tuple[torch.Size, torch.dtype, torch.device], State] = {}

    def get(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> State:
        """The state of an `o` of `shape` and `dtype`."""
        state = self._states.get((shape, dtype, device))
        if state is None:
            num_outgrown = len(self.arena.outgrown)
            message = Message(tuple(shape[:-1]), shape[-1], dtype)
            with torch.inference_mode(False):
                send = self.arena.bytes("send", message.num_bytes, device)
                state = State(message, device, send, *message.views(send), self.arena)
            if len(self._states) >= _MAX_STATES or len(self.arena.outgrown) > num_outgrown:
                self._states.clear()  # those that look at outgrown memory
            self._states[shape, dtype, device] = state
        return state
