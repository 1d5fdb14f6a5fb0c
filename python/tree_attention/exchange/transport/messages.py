# SPDX-License-Identifier: BSD-3-Clause
"""Rounds of messages between some ranks of a group, without a sub-group.

Sub-groups would have to be made by every rank of the world at once, and agree on names; messages
need the group itself and nothing else.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from .buffers import SEAL_BYTES, host_memory
from .deadlines import is_watched

if TYPE_CHECKING:
    from torch.distributed import Work

    from .process_group import Link
    from .shared_memory import SharedRound

# Seals: what the bytes at the end of a message say of the sender's call. Other numbers are digests.
CHANGED = 0  # it is another call than the last one, or some rank's message said so or differed
SAME = 1  # it is the same, and there is nothing more to compare


class Round(Protocol):
    """One step in which all ranks of a group send and receive together, prepared once."""

    def post(self) -> None:
        """Tells the ranks which send to this one that they may. Optional, and before `run`."""

    def run(self, deadline: float) -> None:
        """Sends and receives. The host waits for both on the CPU only."""


class LibraryCall:
    """A collective of the library as a round, with a message to every other rank."""

    def __init__(self, link: Link, run: Callable[[float], None]) -> None:
        self._link, self._run = link, run

    def post(self) -> None:
        pass  # the library does that itself

    def run(self, deadline: float) -> None:
        self._run(deadline)
        self._link.bytes_sent -= SEAL_BYTES * (self._link.world_size - 1)  # as in `Messages`


class Messages:
    """A round of messages: this rank sends tensors to some ranks and receives from some.

    Ranks that share memory leave their messages there; the others' go through the process group.

    A message is as long where it is sent as where it is received. A rank may be its own peer,
    which is a copy. All ranks take part, in the same order, also those without a message. Each
    rank serves the rank after itself first: otherwise all would begin with the same one.

    Sealed messages end in `SEAL_BYTES`, into which goes the sender's `link.seal`. One that differs
    from the receiver's makes the latter CHANGED, which its own later messages pass on. Where the
    memory of messages is a device's, the host reads no seals.

    Args:
        receive, send: contiguous byte tensors by rank, on `device`.
        tag: a number that tells apart rounds which may be under way at the same time.
        sealed: whether messages have a seal.
    """

    def __init__(
        self,
        link: Link,
        receive: Mapping[int, Tensor],
        send: Mapping[int, Tensor],
        device: torch.device,
        tag: int,
        sealed: bool,
    ) -> None:
        self._link, self._tag = link, tag
        self._own = (receive[link.rank], send[link.rank]) if link.rank in receive else None
        following = sorted(send, key=lambda rank: (rank - link.rank) % link.world_size)
        preceding = sorted(receive, key=lambda rank: (link.rank - rank) % link.world_size)
        receive = {rank: receive[rank] for rank in preceding if rank != link.rank}
        send = {rank: send[rank] for rank in following if rank != link.rank}
        self.bytes_sent = sum(tensor.nbytes - SEAL_BYTES * sealed for tensor in send.values())
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
        is_read = sealed and self._device.type == "cpu"
        outgoing = {id(tensor): tensor for tensor in send.values()}
        self._seals_sent = [_seal(tensor) for tensor in outgoing.values() if is_read]
        self._seals_received = [_seal(tensor) for tensor in receive.values() if is_read]
        memory = link.shared_memory
        self._near: SharedRound | None = None
        if self._device.type == "cpu" and memory is not None and not isinstance(memory, str):
            near = [{r: t for r, t in side.items() if r in memory} for side in (receive, send)]
            self._near = memory.round(*near)
            receive = {r: t for r, t in receive.items() if r not in memory}
            send = {r: t for r, t in send.items() if r not in memory}
        self._receive, self._send = receive, send
        self._names = [f"message to rank {rank}" for rank in send]
        self._names += [f"message from rank {rank}" for rank in receive]
        self._posted: list[Work] = []

    def post(self) -> None:
        # A Gloo sender asks its receiver first, which costs a trip there and back.
        if self._device.type == "cpu" and not is_watched():
            self._post()

    def _post(self) -> None:
        group = self._link.group
        self._posted = [group.recv([t], r, self._tag) for r, t in self._receive.items()]

    def run(self, deadline: float) -> None:
        with self._link.operation("round of messages"):
            for host, tensor in self._uploads:
                host.copy_(tensor)
            for seal in self._seals_sent:
                seal.value = self._link.seal
            works: list[Work] = []
            if self._device.type != "cpu" or is_watched():
                self._link.all_to_all_of(self._receive, self._send, self._device, deadline)
            else:
                if not self._posted:
                    self._post()
                group = self._link.group
                works = [group.send([t], r, self._tag) for r, t in self._send.items()]
                works += self._posted
            if self._near is not None:
                self._near.run(deadline)
            for work, name in zip(works, self._names, strict=False):
                self._link.wait(work, self._device, deadline, name)
            self._posted = []
            for seal in self._seals_received:
                if seal.value != self._link.seal:
                    self._link.seal = CHANGED
            if self._own is not None:
                self._own[0].copy_(self._own[1])
            for tensor, host in self._downloads:
                tensor.copy_(host)
        self._link.bytes_sent += self.bytes_sent


def _seal(message: Tensor) -> ctypes.c_uint64:
    """The seal of a message as an integer in its memory, which `message` has to keep alive."""
    return ctypes.c_uint64.from_address(message.data_ptr() + message.nbytes - SEAL_BYTES)
