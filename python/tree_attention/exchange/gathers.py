# SPDX-License-Identifier: BSD-3-Clause
"""Concatenations over ranks, of parts that may differ in size."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .link import Link
from .state import Arena


class Gathers:
    """The all-gathers of a communicator, in buffers that stay."""

    def __init__(self) -> None:
        self._arena = Arena()

    def run(
        self,
        link: Link,
        x: Tensor,
        counts: Sequence[int],
        dim: int,
        result: Tensor,
        deadline: float,
    ) -> None:
        """Writes all ranks' `x`, of `counts` along `dim`, one behind the other into `result`.

        One round to every rank at any size: the all-gather of Gloo takes up to three times as long
        for 32 MiB as for 64 KiB.
        """
        if result.numel() == 0:
            return
        shapes = [(*x.shape[:dim], count, *x.shape[dim + 1 :]) for count in counts]
        sizes = [x.dtype.itemsize * math.prod(shape) for shape in shapes]
        send = self._arena.bytes("send", sizes[link.rank], x.device)
        received = self._arena.bytes("parts", sum(sizes), x.device)
        parts = received.split(sizes)
        send.view(x.dtype).view(x.shape).copy_(x)
        if len(set(counts)) == 1:  # which over NCCL is one call of the library
            gather = link.gather(received.view(link.world_size, -1), send, x.device)
        else:
            senders = {rank: part for rank, part in enumerate(parts) if part.numel()}
            receivers = range(link.world_size if send.numel() else 0)
            gather = link.messages(senders, dict.fromkeys(receivers, send), x.device)
        gather.run(deadline)
        values = [p.view(x.dtype).view(s) for p, s in zip(parts, shapes, strict=True)]
        torch.cat(values, dim, out=result)
