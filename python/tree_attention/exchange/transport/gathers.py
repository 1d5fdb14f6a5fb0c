# SPDX-License-Identifier: BSD-3-Clause
"""Concatenations over ranks, of parts that may differ in size."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .buffers import SEAL_BYTES, Arena, Prepared
from .process_group import Link

# Concatenates all ranks' tensors, before a `time.monotonic` deadline: (this rank's, result,
# deadline).
Gather = Callable[[Tensor, Tensor, float], None]


class Gathers:
    """The all-gathers of a communicator, in buffers that stay."""

    def __init__(self) -> None:
        self._prepared: Prepared[Gather] = Prepared()

    def run(
        self,
        link: Link,
        x: Tensor,
        counts: tuple[int, ...],
        dim: int,
        result: Tensor,
        deadline: float,
    ) -> None:
        """Writes all ranks' `x`, of `counts` along `dim`, one behind the other into `result`."""
        if result.numel() == 0:
            return
        gather = self._prepared.get(
            (x.shape, counts, dim, x.dtype, x.device),
            lambda: _prepare(link, self._prepared.arena, x, counts, dim),
        )
        gather(x, result, deadline)


def _prepare(link: Link, arena: Arena, like: Tensor, counts: Sequence[int], dim: int) -> Gather:
    """One round to every rank at any size, as Gloo's own all-gather is slower at all of them."""
    shape, dtype, device = like.shape, like.dtype, like.device
    shapes = [torch.Size((*shape[:dim], count, *shape[dim + 1 :])) for count in counts]
    sizes = [dtype.itemsize * shape.numel() for shape in shapes]
    # Behind a seal values begin where their dtype may, complex numbers of 16 bytes too.
    widths = [size + max(SEAL_BYTES, dtype.itemsize) for size in sizes]
    send = arena.bytes("send", widths[link.rank], device)
    received = arena.bytes("parts", sum(widths), device)
    parts = received.split(widths)
    if len(set(counts)) == 1:  # which over NCCL is one call of the library
        gather = link.gather(received.view(link.world_size, -1), send, device)
    else:
        everybody = dict.fromkeys(range(link.world_size), send)
        gather = link.messages(dict(enumerate(parts)), everybody, device)

    def values_of(message: Tensor, rank: int) -> Tensor:
        return message[: sizes[rank]].view(dtype).view(shapes[rank])

    own = values_of(send, link.rank)
    values = [values_of(part, rank) for rank, part in enumerate(parts)]

    def run(x: Tensor, result: Tensor, deadline: float) -> None:
        own.copy_(x)
        gather.run(deadline)
        torch.cat(values, dim, out=result)

    return run
