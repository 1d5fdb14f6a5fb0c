# SPDX-License-Identifier: BSD-3-Clause
"""Sums over ranks whose bits do not depend on the route of the messages."""

from __future__ import annotations

import torch
from torch import Tensor

from .link import Link
from .state import Arena

# Below this size in bytes one round to every rank is faster than two with less to send.
_MAX_DIRECT_BYTES = 64 << 10


class Sums:
    """The all-reduces of a communicator, in buffers that stay.

    Ranks' parts are added in float32, left to right in rank order.
    """

    def __init__(self) -> None:
        self._arena = Arena()

    def run(
        self, link: Link, x: Tensor, payload_dtype: torch.dtype, result: Tensor, deadline: float
    ) -> None:
        """Writes the sum of all ranks' `x` into the contiguous `result`."""
        if x.numel() == 0:
            return
        is_direct = x.numel() * payload_dtype.itemsize <= _MAX_DIRECT_BYTES
        # Slices of equal length, the last ones padded.
        count = x.numel() if is_direct else -(-x.numel() // link.world_size)
        send = self._values("send", (1 if is_direct else link.world_size, count), payload_dtype, x)
        send.view(-1)[: x.numel()].view(x.shape).copy_(x)
        parts = self._values("parts", (link.world_size, count), payload_dtype, x)
        total = self._values("total", (count,), torch.float32, x)
        if is_direct:
            link.gather(_bytes(parts), _bytes(send[0]), x.device).run(deadline)
        else:
            link.all_to_all(_bytes(parts), _bytes(send), deadline)
        total.copy_(parts[0])
        for part in parts[1:]:
            total.add_(part)
        if is_direct:
            result.view(-1).copy_(total.to(payload_dtype))
            return
        own = self._values("own slice", (count,), payload_dtype, x)
        own.copy_(total)
        link.gather(_bytes(parts), _bytes(own), x.device).run(deadline)
        result.view(-1).copy_(parts.view(-1)[: x.numel()])

    def _values(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, like: Tensor
    ) -> Tensor:
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        return self._arena.bytes(name, num_bytes, like.device).view(dtype).view(shape)


def _bytes(x: Tensor) -> Tensor:
    return x.view(torch.uint8)
