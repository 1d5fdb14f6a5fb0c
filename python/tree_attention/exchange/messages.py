# SPDX-License-Identifier: BSD-3-Clause
"""Messages between some ranks of a group: what collectives of sub-groups would move, without them.

Sub-groups would have to be made by every rank of the world at once, agree on names and outlive
nobody; messages need only the group itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from .link import ALL_TO_ALL, Link, all_to_all_options, host_memory

if TYPE_CHECKING:
    from torch.distributed import Work


class Round(Protocol):
    """Something that all ranks send and receive together, prepared once."""

    def post(self) -> None:
        """Tells whoever sends to this rank that it may; optional, and before `run`."""

    def run(self, deadline: float) -> None:
        """Sends and receives; the host waits for both on the CPU only."""


def gather_round(
    link: Link, receive: Tensor, send: Tensor, tag: int, device: torch.device
) -> Round:
    """Every rank's `send` to all ranks: `receive` becomes their concatenation, in rank order.

    Over Gloo a message to each, one step where its own all-gather is a ring of them.
    """
    if link.transport_device(device).type != "cpu":
        return _AllGather(link, receive, send)
    everybody = dict.fromkeys(range(link.world_size), send)
    return Messages(link, dict(enumerate(receive)), everybody, tag, device)


class _AllGather:
    def __init__(self, link: Link, receive: Tensor, send: Tensor) -> None:
        self._link, self._receive, self._send = link, receive, send

    def post(self) -> None:
        pass  # the library's own business

    def run(self, deadline: float) -> None:
        self._link.all_gather(self._receive, self._send, deadline)


class Messages:
    """One round: this rank sends tensors to some ranks and receives from some, prepared once.

    What a rank receives from another is as long as what that one sends to it. A rank may be its own
    peer, which is a copy. All ranks take part, in the same order, also those without a message.
    Each begins with the rank after itself, or all would begin with the same one.

    Args:
        receive, send: contiguous byte tensors by rank, on `device`.
        tag: of rounds that may be under way at the same time.
    """

    def __init__(
        self,
        link: Link,
        receive: Mapping[int, Tensor],
        send: Mapping[int, Tensor],
        tag: int,
        device: torch.device,
    ) -> None:
        self._link, self._tag = link, tag
        self._own = (receive[link.rank], send[link.rank]) if link.rank in receive else None
        following = sorted(send, key=lambda rank: (rank - link.rank) % link.world_size)
        preceding = sorted(receive, key=lambda rank: (link.rank - rank) % link.world_size)
        receive = {rank: receive[rank] for rank in preceding if rank != link.rank}
        send = {rank: send[rank] for rank in following if rank != link.rank}
        self.bytes_sent = sum(tensor.nbytes for tensor in send.values())
        self._device = link.transport_device(device)
        self._uploads: list[tuple[Tensor, Tensor]] = []  # (host memory, tensor to send)
        self._downloads: list[tuple[Tensor, Tensor]] = []  # (received tensor, host memory)
        if link.is_staged(device):
            tensors = [*receive.values(), *send.values()]
            hosts = {id(tensor): host_memory(tensor.nbytes) for tensor in tensors}
            self._uploads = [(hosts[id(t)], t) for t in {id(t): t for t in send.values()}.values()]
            self._downloads = [(tensor, hosts[id(tensor)]) for tensor in receive.values()]
            receive = {rank: hosts[id(tensor)] for rank, tensor in receive.items()}
            send = {rank: hosts[id(tensor)] for rank, tensor in send.items()}
        self._receive, self._send = receive, send
        self._names = [f"to rank {rank}" for rank in send] + [f"from rank {r}" for r in receive]
        self._posted: list[Work] = []

    def post(self) -> None:
        """Lets peers send at once. A Gloo sender asks first, which costs a trip there and back."""
        if self._device.type == "cpu" and not _is_watched():
            group = self._link.group
            self._posted = [group.recv([t], r, self._tag) for r, t in self._receive.items()]

    def run(self, deadline: float) -> None:
        with self._link.operation("messages"):
            for host, tensor in self._uploads:
                host.copy_(tensor)
            if self._device.type == "cpu" and _is_watched():
                self._run_as_collective(deadline)
            else:
                for work, name in self._start(deadline):
                    self._link.wait(work, self._device, deadline, name)
                self._posted = []
            if self._own is not None:
                self._own[0].copy_(self._own[1])
            for tensor, host in self._downloads:
                tensor.copy_(host)
        self._link.bytes_sent += self.bytes_sent

    def _start(self, deadline: float) -> list[tuple[Work, str]]:
        group = self._link.group
        if self._device.type == "cpu":
            if not self._posted:
                self.post()
            works = [group.send([t], r, self._tag) for r, t in self._send.items()] + self._posted
            return list(zip(works, self._names, strict=True))
        options = all_to_all_options(deadline)
        nothing = torch.empty(0, dtype=torch.uint8, device=self._device)
        ranks = range(self._link.world_size)
        receive = [self._receive.get(rank, nothing) for rank in ranks]
        send = [self._send.get(rank, nothing) for rank in ranks]
        return [(group.alltoall(receive, send, options), "of all ranks")]

    def _run_as_collective(self, deadline: float) -> None:
        ranks = range(self._link.world_size)
        nothing = torch.empty(0, dtype=torch.uint8)
        receive = [self._receive.get(rank, nothing) for rank in ranks]
        send = [self._send.get(rank, nothing) for rank in ranks]
        options = all_to_all_options(deadline)
        sizes = [[tensor.numel() for tensor in tensors] for tensors in (receive, send)]
        target = torch.cat(receive)
        all_to_all = getattr(self._link.group, ALL_TO_ALL)
        work = all_to_all(target, torch.cat(send), *sizes, options)
        self._link.wait(work, self._device, deadline)
        for tensor, part in zip(receive, target.split(sizes[0]), strict=True):
            tensor.copy_(part)


def _is_watched() -> bool:
    """Whether torch compares the ranks' collectives (TORCH_DISTRIBUTED_DEBUG=DETAIL).

    It counts the messages of each rank with them, and would refuse the next collective where ranks
    have sent different numbers.
    """
    return dist.get_debug_level() == dist.DebugLevel.DETAIL
