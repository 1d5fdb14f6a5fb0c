# SPDX-License-Identifier: BSD-3-Clause
"""Sums over ranks whose bits do not depend on the route of the messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from .buffers import SEAL_BYTES, Arena, Prepared
from .process_group import Link

# Below this size in bytes one round to every rank is faster than two with less to send.
_MAX_DIRECT_BYTES = 64 << 10

# Adds all ranks' tensors, before a `time.monotonic` deadline: (this rank's, result, deadline).
Sum = Callable[[Tensor, Tensor, float], None]


class Sums:
    """The all-reduces of a communicator, in buffers that stay.

    Ranks' parts are added in float32, left to right in rank order.
    """

    def __init__(self) -> None:
        self._prepared: Prepared[Sum] = Prepared()

    def run(
        self, link: Link, x: Tensor, payload_dtype: torch.dtype, result: Tensor, deadline: float
    ) -> None:
        """Writes the sum of all ranks' `x` into the contiguous `result`."""
        if x.numel() == 0:
            return
        is_direct = x.numel() * payload_dtype.itemsize <= _MAX_DIRECT_BYTES
        prepare = _in_one_round if is_direct else _in_two_phases
        run = self._prepared.get(
            (prepare, x.shape, payload_dtype, x.device),
            lambda: prepare(link, _Buffers(self._prepared.arena, x.device), x.shape, payload_dtype),
        )
        run(x, result, deadline)


class _Buffers:
    def __init__(self, arena: Arena, device: torch.device) -> None:
        self._arena, self.device = arena, device

    def values(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        return self._arena.bytes(name, num_bytes, self.device).view(dtype).view(shape)

    def messages(
        self, name: str, num_messages: int, shape: tuple[int, ...], dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Messages with values of `shape`: as bytes `[num_messages, ...]`, and their values."""
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        width = num_bytes + SEAL_BYTES
        memory = self._arena.bytes(name, num_messages * width, self.device).view(-1, width)
        return memory, memory[:, :num_bytes].view(dtype).view(num_messages, *shape)


def _in_one_round(link: Link, buffers: _Buffers, shape: torch.Size, dtype: torch.dtype) -> Sum:
    message, own = buffers.messages("send", 1, shape, dtype)
    received, parts = buffers.messages("parts", link.world_size, shape, dtype)
    total = buffers.values("total", shape, torch.float32)
    gather = link.gather(received, message[0], buffers.device)
    send, values = own[0], parts.unbind()

    def run(x: Tensor, result: Tensor, deadline: float) -> None:
        send.copy_(x)
        gather.run(deadline)
        _add(values, total)
        # Rounded to the payload's dtype, and from that to the result's.
        result.copy_(total if result.dtype == dtype else total.to(dtype))

    return run


def _in_two_phases(link: Link, buffers: _Buffers, shape: torch.Size, dtype: torch.dtype) -> Sum:
    # Slices of equal length, the last ones padded.
    world_size, count = link.world_size, -(-shape.numel() // link.world_size)
    outgoing, send = buffers.messages("send", world_size, (count,), dtype)
    incoming, parts = buffers.messages("parts", world_size, (count,), dtype)
    message, own = buffers.messages("own slice", 1, (count,), dtype)
    total = buffers.values("total", (count,), torch.float32)
    transpose = link.transpose(incoming, outgoing, buffers.device)
    gather = link.gather(incoming, message[0], buffers.device, tag=1)
    values, bounds = parts.unbind(), [*range(0, shape.numel(), count), shape.numel()]
    slices = [slice(begin, end) for begin, end in pairwise(bounds)]

    def run(x: Tensor, result: Tensor, deadline: float) -> None:
        x, flat = x.reshape(-1), result.view(-1)
        for part, place in zip(send, slices, strict=False):
            part[: place.stop - place.start].copy_(x[place])
        transpose.run(deadline)
        _add(values, total)
        own.copy_(total)
        gather.run(deadline)
        for part, place in zip(values, slices, strict=False):
            flat[place].copy_(part[: place.stop - place.start])

    return run


def _add(parts: Sequence[Tensor], total: Tensor) -> None:
    total.copy_(parts[0])
    for part in parts[1:]:
        total.add_(part)
