# SPDX-License-Identifier: BSD-3-Clause
"""Messages between some ranks of a group: what collectives of sub-groups would move, without them.

Sub-groups would have to be made by every rank of the world at once, agree on names and outlive
nobody; messages need only the group itself.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import AllToAllOptions

from .link import Link, host_memory, remaining

if TYPE_CHECKING:
    from torch.distributed import Work


class Messages:
    """One round: this rank sends tensors to some ranks and receives from some, prepared once.

    What a rank receives from another is as long as what that one sends to it. A rank may be its own
    peer, which is a copy. All ranks take part, in their rounds' order, also without a message.

    Args:
        receive, send: contiguous byte tensors by rank.
        tag: of rounds that may be under way at the same time.
    """

    def __init__(
        self, link: Link, receive: Mapping[int, Tensor], send: Mapping[int, Tensor], tag: int
    ) -> None:
        self._link, self._tag = link, tag
        self._own = (receive[link.rank], send[link.rank]) if link.rank in receive else None
        receive = {rank: tensor for rank, tensor in receive.items() if rank != link.rank}
        send = {rank: tensor for rank, tensor in send.items() if rank != link.rank}
        self.bytes_sent = sum(tensor.nbytes for tensor in send.values())
        tensors = [*receive.values(), *send.values()]
        self._device = tensors[0].device if tensors else torch.device("cpu")
        self._uploads: list[tuple[Tensor, Tensor]] = []  # (host memory, tensor to send)
        self._downloads: list[tuple[Tensor, Tensor]] = []  # (received tensor, host memory)
        if tensors and link.is_staged(self._device):
            self._device = torch.device("cpu")
            hosts = {id(tensor): host_memory(tensor.nbytes) for tensor in tensors}
            self._uploads = [(hosts[id(t)], t) for t in {id(t): t for t in send.values()}.values()]
            self._downloads = [(tensor, hosts[id(tensor)]) for tensor in receive.values()]
            receive = {rank: hosts[id(tensor)] for rank, tensor in receive.items()}
            send = {rank: hosts[id(tensor)] for rank, tensor in send.items()}
        self._receive, self._send = receive, send
        self._posted: list[Work] = []

    def post(self) -> None:
        """Lets peers send at once. A Gloo sender asks first, which costs a trip there and back."""
        if self._device.type == "cpu":
            group = self._link.group
            self._posted = [group.recv([t], r, self._tag) for r, t in self._receive.items()]

    def run(self, deadline: float) -> None:
        """Sends and receives; the host waits for both on the CPU only."""
        start = time.perf_counter()
        for host, tensor in self._uploads:
            host.copy_(tensor)
        for work in self._start(deadline):
            self._link.wait(work, self._device, deadline)
        self._posted = []
        for tensor, host in self._downloads:
            tensor.copy_(host)
        self._link.bytes_sent += self.bytes_sent
        self._link.num_operations += 1
        self._link.seconds += time.perf_counter() - start

    def _start(self, deadline: float) -> list[Work]:
        group = self._link.group
        if self._device.type == "cpu":
            if not self._posted:
                self.post()
            works = [group.send([t], r, self._tag) for r, t in self._send.items()] + self._posted
            self._copy_own()
            return works
        self._copy_own()
        options = AllToAllOptions()
        options.timeout = remaining(deadline)
        nothing = torch.empty(0, dtype=torch.uint8, device=self._device)
        ranks = range(self._link.world_size)
        receive = [self._receive.get(rank, nothing) for rank in ranks]
        return [group.alltoall(receive, [self._send.get(rank, nothing) for rank in ranks], options)]

    def _copy_own(self) -> None:
        if self._own is not None:
            self._own[0].copy_(self._own[1])
