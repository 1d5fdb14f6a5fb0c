# SPDX-License-Identifier: BSD-3-Clause
"""Sums over ranks whose bits do not depend on the route of the messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .link import Link
from .state import Arena, Prepared

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


def _in_one_round(link: Link, buffers: _Buffers, shape: torch.Size, dtype: torch.dtype) -> Sum:
    send = buffers.values("send", shape, dtype)
    parts = buffers.values("parts", (link.world_size, *shape), dtype)
    total = buffers.values("total", shape, torch.float32)
    gather = link.gather(_bytes(parts, link.world_size), _bytes(send, 1)[0], buffers.device)
    values = parts.unbind()

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
    send = buffers.values("send", (world_size, count), dtype)
    parts = buffers.values("parts", (world_size, count), dtype)
    total = buffers.values("total", (count,), torch.float32)
    own = buffers.values("own slice", (count,), dtype)
    load, found = (x.view(-1)[: shape.numel()].view(shape) for x in (send, parts))
    outgoing, incoming = _bytes(send, world_size), _bytes(parts, world_size)
    transpose = link.transpose(incoming, outgoing, buffers.device)
    gather = link.gather(incoming, _bytes(own, 1)[0], buffers.device, tag=1)
    values = parts.unbind()

    def run(x: Tensor, result: Tensor, deadline: float) -> None:
        load.copy_(x)
        transpose.run(deadline)
        _add(values, total)
        own.copy_(total)
        gather.run(deadline)
        result.copy_(found)

    return run


def _add(parts: Sequence[Tensor], total: Tensor) -> None:
    total.copy_(parts[0])
    for part in parts[1:]:
        total.add_(part)


def _bytes(x: Tensor, num_rows: int) -> Tensor:
    return x.view(num_rows, -1).view(torch.uint8)
