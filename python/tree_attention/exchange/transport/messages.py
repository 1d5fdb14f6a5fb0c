# SPDX-License-Identifier: BSD-3-Clause
"""Rounds of messages between some ranks of a group, without a sub-group.

Sub-groups would have to be made by every rank of the world at once, and agree on names; messages
need the group itself and nothing else.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from .buffers import CALL_ID_BYTES
from .deadlines import is_watched
from .replay import Replay

ByRank = Mapping[int, Tensor]

# Call ids, in which messages end. Other numbers are digests of the queries of a call.
OTHER_CALL = 0  # the sender makes another call than the last one, or has received another id
SAME_CALL = 1  # the sender repeats its last call, which has no queries to compare


class Transport(Protocol):
    """The parts of a group that its rounds use: `process_group.Link` has them."""

    rank: int
    world_size: int
    call_id: int
    replay: Replay
    bytes_sent: int

    @property
    def group(self) -> ProcessGroup: ...
    @property
    def transports(self) -> list[DirectTransport]: ...
    def is_staged(self, device: torch.device) -> bool: ...
    def transport_device(self, device: torch.device) -> torch.device: ...
    def host_memory(self, num_bytes: int) -> Tensor: ...
    def operation(self, name: str, is_counted: bool = True) -> AbstractContextManager[None]: ...
    def all_to_all_of(
        self, receive: list[Tensor], send: list[Tensor], device: torch.device, deadline: float
    ) -> Work | None: ...
    def wait(
        self, work: Work | None, device: torch.device, deadline: float, name: str = ""
    ) -> None: ...


class Round:
    """One step in which all ranks of a group send and receive together, prepared once."""

    def post(self) -> None:
        """Tells the ranks which send to this one that they may. Optional, and before `run`."""

    def start(self, deadline: float) -> None:
        """Begins to send and to receive. Between this and `finish` the caller may compute."""
        raise NotImplementedError

    def finish(self, deadline: float) -> None:
        """Waits for what `start` began. The host waits on the CPU only."""

    def run(self, deadline: float) -> None:
        """Sends and receives."""
        self.start(deadline)
        self.finish(deadline)


class LibraryCall(Round):
    """A collective of the library, which posts by itself, with a message to every other rank."""

    def __init__(self, link: Transport, run: Callable[[float], None]) -> None:
        self._link, self._run = link, run

    def start(self, deadline: float) -> None:
        self._run(deadline)
        self._link.bytes_sent -= CALL_ID_BYTES * (self._link.world_size - 1)  # as in `Messages`


class PointToPoint(Round):
    """Messages of the process group, each by itself."""

    def __init__(self, link: Transport, receive: ByRank, send: ByRank, tag: int) -> None:
        self._link, self._receive, self._send, self._tag = link, receive, send, tag
        self._names = [f"message to rank {rank}" for rank in send]
        self._names += [f"message from rank {rank}" for rank in receive]
        self._received: list[Work] = []
        self._sent: list[Work] = []

    def post(self) -> None:
        # A Gloo sender asks its receiver first, which costs a trip there and back.
        group = self._link.group
        self._received = [group.recv([t], rank, self._tag) for rank, t in self._receive.items()]

    def start(self, deadline: float) -> None:
        if not self._received:
            self.post()
        group = self._link.group
        self._sent = [group.send([t], rank, self._tag) for rank, t in self._send.items()]

    def finish(self, deadline: float) -> None:
        for work, name in zip([*self._sent, *self._received], self._names, strict=True):
            self._link.wait(work, torch.device("cpu"), deadline, name)
        self._received = []


class AllToAll(Round):
    """Messages of any length as one all-to-all: NCCL queues them together, and where torch watches
    collectives, it would take messages of some ranks for collectives that the others lack."""

    def __init__(
        self, link: Transport, receive: ByRank, send: ByRank, device: torch.device
    ) -> None:
        nothing = torch.empty(0, dtype=torch.uint8, device=device)
        self._link, self._device = link, device
        self._receive = [receive.get(rank, nothing) for rank in range(link.world_size)]
        self._send = [send.get(rank, nothing) for rank in range(link.world_size)]
        self._work: Work | None = None

    def start(self, deadline: float) -> None:
        send, receive = self._send, self._receive
        self._work = self._link.all_to_all_of(receive, send, self._device, deadline)

    def finish(self, deadline: float) -> None:
        self._link.wait(self._work, self._device, deadline, "messages of all ranks")


class DirectTransport:
    """Shared memory or connections to some ranks; the calling thread itself moves the messages.

    When it is closed, rounds under way end, here and on the other ranks.
    """

    def __init__(self, moved_by: Any, numbers: Mapping[int, int]) -> None:
        """`moved_by` is the `SharedMemory` or `Sockets` of the extension, which knows ranks by
        `numbers`."""
        self._moved_by, self._numbers = moved_by, numbers
        self.close: Callable[[], None] = moved_by.close

    def __contains__(self, rank: object) -> bool:
        return rank in self._numbers

    def round(self, receive: ByRank, send: ByRank) -> DirectRound:
        """Messages to and from these ranks, as long at their sender as at their receiver."""
        places = (
            [(self._numbers[rank], tensor.data_ptr(), tensor.nbytes) for rank, tensor in x.items()]
            for x in (receive, send)
        )
        return DirectRound(self._moved_by.round(*places), (receive, send))


class DirectRound(Round):
    """Messages of a `DirectTransport`. Messages to other hosts begin to go out at `start`."""

    def __init__(self, prepared: Any, kept: object) -> None:
        """`kept`: the messages. `prepared` holds only their addresses, so they must live on."""
        self._prepared, self._kept = prepared, kept
        self._is_network = hasattr(prepared, "start")

    def start(self, deadline: float) -> None:
        if self._is_network:
            self._prepared.start()
        else:
            self._move(deadline)

    def finish(self, deadline: float) -> None:
        if self._is_network:
            self._move(deadline)

    def _move(self, deadline: float) -> None:
        """Raises RuntimeError after the deadline, or when a rank has ended or closed its side."""
        is_main_thread = threading.current_thread() is threading.main_thread()
        self._prepared.run(deadline - time.monotonic(), is_main_thread)


class Messages(Round):
    """A round of messages: this rank sends tensors to some ranks and receives from some.

    Ranks that share memory leave their messages there; the others' go through connections of their
    own or through the process group.

    A message is as long where it is sent as where it is received. A rank may be its own peer,
    which is a copy, or nothing where both are the same memory. All ranks take part, in the same
    order, also those without a message. Each rank serves the rank after itself first: otherwise all
    would begin with the same one.

    Messages with a call id end in `CALL_ID_BYTES`, into which goes the sender's `link.call_id`. A
    receiver whose own id differs sets it to OTHER_CALL, which its later messages pass on. The host
    reads no ids where the memory of messages is a device's.

    Tensors are contiguous bytes on `device`. Rounds that may be under way at the same time differ
    in their `tag`.
    """

    def __init__(
        self,
        link: Transport,
        receive: ByRank,
        send: ByRank,
        device: torch.device,
        tag: int,
        has_call_id: bool,
    ) -> None:
        self._link = link
        own = (receive[link.rank], send[link.rank]) if link.rank in receive else None
        is_same = own is not None and own[0].data_ptr() == own[1].data_ptr()
        self._own = None if is_same else own
        following = sorted(send, key=lambda rank: (rank - link.rank) % link.world_size)
        preceding = sorted(receive, key=lambda rank: (link.rank - rank) % link.world_size)
        receive = {rank: receive[rank] for rank in preceding if rank != link.rank}
        send = {rank: send[rank] for rank in following if rank != link.rank}
        self.bytes_sent = sum(
            tensor.nbytes - CALL_ID_BYTES * has_call_id for tensor in send.values()
        )
        self._uploads: list[tuple[Tensor, Tensor]] = []  # (host memory, tensor to send)
        self._downloads: list[tuple[Tensor, Tensor]] = []  # (received tensor, host memory)
        if link.is_staged(device):
            tensors = [*receive.values(), *send.values()]
            hosts = {id(tensor): link.host_memory(tensor.nbytes) for tensor in tensors}
            self._uploads = [(hosts[id(t)], t) for t in {id(t): t for t in send.values()}.values()]
            self._downloads = [(tensor, hosts[id(tensor)]) for tensor in receive.values()]
            receive = {rank: hosts[id(tensor)] for rank, tensor in receive.items()}
            send = {rank: hosts[id(tensor)] for rank, tensor in send.items()}
        device = link.transport_device(device)
        self._is_on_host = device.type == "cpu"
        is_read = has_call_id and self._is_on_host
        outgoing = {id(tensor): tensor for tensor in send.values()}
        self._ids_sent = [_call_id_of(tensor) for tensor in outgoing.values() if is_read]
        self._ids_received = [_call_id_of(tensor) for tensor in receive.values() if is_read]
        self._rounds = _rounds(link, receive, send, device, tag)
        self._repeated = partial(_repeat, tuple(receive), tuple(send), device, tag, has_call_id)
        self._tensors = [*receive.values(), *send.values()]

    def post(self) -> None:
        for part in self._rounds:
            part.post()

    def start(self, deadline: float) -> None:
        if self._is_on_host:  # or its receivers would take a replay for a message
            self._link.replay.note(self._repeated, self._tensors)
        with self._link.operation("round of messages"):
            for host, tensor in self._uploads:
                host.copy_(tensor)
            for call_id in self._ids_sent:
                call_id.value = self._link.call_id
            for part in self._rounds:
                part.start(deadline)

    def finish(self, deadline: float) -> None:
        with self._link.operation("round of messages", is_counted=False):
            for part in self._rounds:
                part.finish(deadline)
            for call_id in self._ids_received:
                if call_id.value != self._link.call_id:
                    self._link.call_id = OTHER_CALL
            if self._own is not None:
                self._own[0].copy_(self._own[1])
            for tensor, host in self._downloads:
                tensor.copy_(host)
            self._link.bytes_sent += self.bytes_sent


def _repeat(
    sources: Sequence[int],
    targets: Sequence[int],
    device: torch.device,
    tag: int,
    has_call_id: bool,
    link: Transport,
    tensors: Sequence[Tensor],
    deadline: float,
) -> None:
    """A round of messages between the same ranks, in other tensors."""
    receive = dict(zip(sources, tensors, strict=False))
    send = dict(zip(targets, tensors[len(sources) :], strict=True))
    Messages(link, receive, send, device, tag, has_call_id).run(deadline)


def _rounds(
    link: Transport, receive: ByRank, send: ByRank, device: torch.device, tag: int
) -> list[Round]:
    """The messages between this rank and others, by the transport that carries them."""
    if device.type != "cpu" or is_watched():
        return [AllToAll(link, receive, send, device)]
    rounds: list[Round] = []
    for transport in link.transports:
        near = ({r: t for r, t in x.items() if r in transport} for x in (receive, send))
        # In front: the network sends while this rank is busy with the memory.
        rounds.insert(0, transport.round(*near))
        receive, send = (
            {r: t for r, t in x.items() if r not in transport} for x in (receive, send)
        )
    if receive or send or not rounds:
        rounds.insert(0, PointToPoint(link, receive, send, tag))
    return rounds


def _call_id_of(message: Tensor) -> ctypes.c_uint64:
    """The call id of a message as an integer in its memory, which `message` has to keep alive."""
    return ctypes.c_uint64.from_address(message.data_ptr() + message.nbytes - CALL_ID_BYTES)
