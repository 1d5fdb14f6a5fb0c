# SPDX-License-Identifier: BSD-3-Clause
"""The buffers of an exchange: one message per rank, laid out for kernel, wire and merge."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

_MAX_STATES = 64


@dataclass(frozen=True)
class State:
    """Views of a rank's message and of all ranks' messages, float32.

    A message is `[rows * head_dim | rows]`: first o, then lse, so that vectors of o stay aligned.
    """

    send: Tensor  # [rows * (head_dim + 1)]
    receive: Tensor  # [world_size * rows * (head_dim + 1)]
    o: Tensor  # [batch, num_heads_q, seqlen_q, head_dim] in send
    lse: Tensor  # [batch, num_heads_q, seqlen_q] in send
    o_parts: Tensor  # [world_size, batch, num_heads_q, seqlen_q, head_dim] in receive
    lse_parts: Tensor  # [world_size, batch, num_heads_q, seqlen_q] in receive


class StateBuffers:
    """Memory for states of any shape, which never moves: captured graphs may hold its addresses."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._memory: dict[torch.device, tuple[Tensor, Tensor]] = {}
        self._outgrown: list[tuple[Tensor, Tensor]] = []
        self._states: dict[tuple[torch.Size, torch.device], State] = {}

    def get(self, shape: torch.Size, device: torch.device) -> State:
        """The state of an `o` of `shape`; its memory is shared with every other shape."""
        state = self._states.get((shape, device))
        if state is None:
            if len(self._states) >= _MAX_STATES:
                self._states.clear()
            with torch.inference_mode(False):  # or nobody could write to them outside of it
                state = self._states[shape, device] = self._make(shape, device)
        return state

    def _make(self, shape: torch.Size, device: torch.device) -> State:
        rows = math.prod(shape[:-1])
        o_size, size = rows * shape[-1], rows * (shape[-1] + 1)
        send, receive = self._memory.get(device, (None, None))
        if send is None or receive is None or send.numel() < size:
            if send is not None and receive is not None:
                self._outgrown.append((send, receive))
            # Doubling bounds what is outgrown by what is in use.
            capacity = max(size, 0 if send is None else 2 * send.numel())
            send = torch.empty(capacity, dtype=torch.float32, device=device)
            receive = torch.empty(capacity * self._world_size, dtype=torch.float32, device=device)
            self._memory[device] = send, receive
            self._states.clear()
        send, receive = send[:size], receive[: self._world_size * size]
        parts = receive.view(self._world_size, size)
        return State(
            send,
            receive,
            send[:o_size].view(shape),
            send[o_size:].view(shape[:-1]),
            parts[:, :o_size].view(self._world_size, *shape),
            parts[:, o_size:].view(self._world_size, *shape[:-1]),
        )
