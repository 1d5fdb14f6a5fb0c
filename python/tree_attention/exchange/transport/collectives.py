# SPDX-License-Identifier: BSD-3-Clause
"""Sums and concatenations over ranks, whose bits do not depend on the route of the messages."""

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from ..._loader import load
from .buffers import CALL_ID_BYTES, Arena, Prepared
from .process_group import Link

# Below this size in bytes one round to every rank is faster than two with less to send.
_MAX_DIRECT_BYTES = 64 << 10

# This rank's tensor, the result to write and a `time.monotonic` deadline.
_Collective = Callable[[Tensor, Tensor, float], None]


class Collectives:
    """The all-reduces and all-gathers of a communicator, in buffers that stay."""

    def __init__(self) -> None:
        self.prepared: Prepared[_Collective] = Prepared()

    def all_reduce(
        self, link: Link, x: Tensor, payload_dtype: torch.dtype, deadline: float
    ) -> Tensor:
        """The float32 sum of all ranks' `x`, left to right in rank order."""
        result = torch.empty_like(x, memory_format=torch.contiguous_format)
        if x.numel():
            is_direct = x.numel() * payload_dtype.itemsize <= _MAX_DIRECT_BYTES
            prepare = _in_one_round if is_direct else _in_two_phases
            run = self.prepared.get(
                (prepare, x.shape, payload_dtype, x.device),
                lambda: prepare(link, self.prepared.arena, x.shape, payload_dtype, x.device),
            )
            run(x, result, deadline)
        return result

    def all_gather(
        self, link: Link, x: Tensor, counts: tuple[int, ...], dim: int, deadline: float
    ) -> Tensor:
        """All ranks' `x`, of `counts` along `dim`, one after another."""
        result = x.new_empty((*x.shape[:dim], sum(counts), *x.shape[dim + 1 :]))
        if result.numel():
            run = self.prepared.get(
                (x.shape, counts, dim, x.dtype, x.device),
                lambda: _gather(link, self.prepared.arena, x, counts, dim),
            )
            run(x, result, deadline)
        return result


def _messages(
    arena: Arena,
    name: str,
    num_messages: int,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """Messages of `shape` and a call id: their bytes `[num_messages, ...]`, and the values."""
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    width = num_bytes + CALL_ID_BYTES
    memory = arena.bytes(name, num_messages * width, device).view(-1, width)
    return memory, memory[:, :num_bytes].view(dtype).view(num_messages, *shape)


def _in_one_round(
    link: Link, arena: Arena, shape: torch.Size, dtype: torch.dtype, device: torch.device
) -> _Collective:
    received, parts = _messages(arena, "parts", link.world_size, shape, dtype, device)
    gather = link.gather(received, received[link.rank], device)
    values = parts.unbind()

    def run(x: Tensor, result: Tensor, deadline: float) -> None:
        values[link.rank].copy_(x)
        gather.run(deadline)
        # Rounded to the payload's dtype, and from that to the result's.
        total = result if result.dtype == dtype else torch.empty_like(result, dtype=dtype)
        _sum(values, total)
        if total is not result:
            result.copy_(total)

    return run


def _in_two_phases(
    link: Link, arena: Arena, shape: torch.Size, dtype: torch.dtype, device: torch.device
) -> _Collective:
    # Slices of equal length, the last ones padded.
    world_size, count = link.world_size, -(-shape.numel() // link.world_size)
    outgoing, send = _messages(arena, "send", world_size, (count,), dtype, device)
    incoming, parts = _messages(arena, "parts", world_size, (count,), dtype, device)
    transpose = link.transpose(incoming, outgoing, device)
    gather = link.gather(incoming, incoming[link.rank], device, tag=1)
    values, bounds = parts.unbind(), [*range(0, shape.numel(), count), shape.numel()]
    slices = [slice(begin, end) for begin, end in pairwise(bounds)]

    def run(x: Tensor, result: Tensor, deadline: float) -> None:
        x, flat = x.reshape(-1), result.view(-1)
        for part, place in zip(send, slices, strict=False):
            part[: place.stop - place.start].copy_(x[place])
        transpose.run(deadline)
        _sum(values, values[link.rank])
        gather.run(deadline)
        for part, place in zip(values, slices, strict=False):
            flat[place].copy_(part[: place.stop - place.start])

    return run


def _sum(parts: Sequence[Tensor], total: Tensor) -> None:
    """The sum in float32, left to right, rounded to the dtype of the parts and of `total`, which
    may be one of them."""
    if total.is_cpu:
        load().sum_rows(parts, total)
        return
    added = parts[0].float()
    for part in parts[1:]:
        added = added + part
    total.copy_(added)


def _gather(link: Link, arena: Arena, like: Tensor, counts: Sequence[int], dim: int) -> _Collective:
    """One round to every rank at any size, as Gloo's own all-gather is slower at all of them."""
    shape, dtype, device = like.shape, like.dtype, like.device
    shapes = [torch.Size((*shape[:dim], count, *shape[dim + 1 :])) for count in counts]
    sizes = [dtype.itemsize * shape.numel() for shape in shapes]
    # A call id takes at least an element, so that the next message begins where its dtype may.
    widths = [size + max(CALL_ID_BYTES, dtype.itemsize) for size in sizes]
    received = arena.bytes("parts", sum(widths), device)
    parts = received.split(widths)
    send = parts[link.rank]
    if len(set(counts)) == 1:  # which over NCCL is one call of the library
        gather = link.gather(received.view(link.world_size, -1), send, device)
    else:
        everybody = dict.fromkeys(range(link.world_size), send)
        gather = link.messages(dict(enumerate(parts)), everybody, device)

    def values_of(message: Tensor, rank: int) -> Tensor:
        return message[: sizes[rank]].view(dtype).view(shapes[rank])

    values = [values_of(part, rank) for rank, part in enumerate(parts)]

    def run(x: Tensor, result: Tensor, deadline: float) -> None:
        values[link.rank].copy_(x)
        gather.run(deadline)
        torch.cat(values, dim, out=result)

    return run
