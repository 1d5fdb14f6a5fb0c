# SPDX-License-Identifier: BSD-3-Clause
"""A process group whose operations end in time and are counted."""

import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Work
from torch.distributed.distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    BroadcastOptions,
)

from ..notes import OtherCall
from .buffers import CALL_ID_BYTES, host_memory
from .deadlines import is_watched, remaining
from .messages import OTHER_CALL, SAME_CALL, DirectTransport, LibraryCall, Messages, Round
from .replay import Replay, Step

# The methods that dist.all_gather_into_tensor and dist.all_to_all_single call. These two take no
# timeout. The methods have other names after torch 2.11.
_ALL_GATHER, _ALL_TO_ALL = (
    new if hasattr(dist.ProcessGroup, new) else old
    for new, old in (
        ("all_gather_single", "_allgather_base"),
        ("all_to_all_single", "alltoall_base"),
    )
)
_Options = TypeVar(
    "_Options", AllgatherOptions, AllreduceOptions, AllToAllOptions, BroadcastOptions
)
# All users of a group share its tags, and Gloo ends the process where a message meets a receiver of
# another size. So the tags of this library begin far above the numbers that programs count, and end
# with the largest integer that torch takes, 2^31 - 1.
FIRST_TAG = 1 << 30
# The tags of one communicator: more than its rounds and a ring's tensors need.
NUM_TAGS = 256
# No operation uses this tag: a receive with it can only end by its timeout.
_NOBODYS_TAG = FIRST_TAG
# An operation that ends at the deadline reports why a little later.
_REPORT_SECONDS = 0.3


class Link:
    """A process group as strategies see it: every byte they send goes through its methods.

    Over NCCL, operations are queued on the current stream and the host waits for nothing; a lost
    rank shows at the group's watchdog. Gloo moves host memory: tensors of a device are staged.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank = group.rank()
        self.world_size = group.size()
        self.bytes_sent = 0
        self.num_operations = 0
        self.seconds = 0.0
        # The id of the call under way, which its messages carry (`Messages`).
        self.call_id = SAME_CALL
        self.replay = Replay()
        # The least tag of this communicator's messages; no other of the group has the same tags.
        self.first_tag = FIRST_TAG
        # To the other ranks of this node, or why there is none; None before the first call.
        self.shared_memory: DirectTransport | str | None = None
        # To the ranks that share no memory with this one, or why those use the group.
        self.sockets: DirectTransport | str | None = None
        # Weak, so that a destroyed group is not kept alive by a cache.
        self._group = weakref.ref(group)
        config = dist.get_backend_config(group)
        self._backends = dict(pair.split(":") for pair in config.split(","))
        self._host_buffers: dict[str, Tensor] = {}
        # Bytes of host memory through which tensors of devices travel, here and in all rounds.
        self.staged_bytes = 0
        self._ids_round: Round | None = None

    def forget_ids_round(self) -> None:
        """Drops the round that was prepared before there were direct transports: it would still use
        the process group, while its replay uses the transports."""
        self._ids_round = None

    def use_tags_of(self, number: int) -> None:
        """Takes the tags of the communicator with this number, from 1 on. Only communicators whose
        numbers are four million apart have the same tags."""
        self.first_tag = FIRST_TAG + NUM_TAGS * (1 + (number - 1) % (FIRST_TAG // NUM_TAGS - 1))

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Leaves what is done in it out of the counters, unless it raises."""
        counted = self.bytes_sent, self.num_operations, self.seconds
        yield
        self.bytes_sent, self.num_operations, self.seconds = counted

    def backend(self, device: torch.device) -> str:
        """Name of the library that moves the tensors of `device`, through host memory or not."""
        return self._backends.get(self.transport_device(device).type, "gloo")

    def gather(self, receive: Tensor, send: Tensor, device: torch.device, tag: int = 0) -> Round:
        """A round in which every rank's `send` goes to all ranks, with its call id.

        Row r of `receive` becomes what rank r sends. Over Gloo that is a message to each rank, one
        step where its own all-gather is a ring of `world_size - 1`.
        """
        if self.transport_device(device).type != "cpu":
            return LibraryCall(self, partial(self.all_gather, receive, send))
        everybody = dict.fromkeys(range(self.world_size), send)
        return self.messages(dict(enumerate(receive)), everybody, device, tag)

    def transpose(self, receive: Tensor, send: Tensor, device: torch.device) -> Round:
        """A round in which row r of every rank's `send`, a message with a call id, goes to rank r.

        Row r of `receive` becomes what rank r sends to this one.
        """
        if self.transport_device(device).type != "cpu":
            return LibraryCall(self, partial(self.all_to_all, receive, send))
        return self.messages(dict(enumerate(receive)), dict(enumerate(send)), device)

    def messages(
        self,
        receive: Mapping[int, Tensor],
        send: Mapping[int, Tensor],
        device: torch.device,
        tag: int = 0,
        *,
        has_call_id: bool = True,
    ) -> Round:
        """A round in which this rank sends and receives byte tensors, by rank."""
        return Messages(self, receive, send, device, self.first_tag + tag, has_call_id)

    def exchange_call_ids(self, deadline: float) -> None:
        """Raises OtherCall on every rank unless all are in the same call, by their call ids.

        For calls whose own messages carry none. Over NCCL, whose host waits for no message, it
        does nothing.
        """
        host = torch.device("cpu")
        if self.transport_device(host) != host:
            return
        if self._ids_round is None:
            with torch.inference_mode(False):  # or nobody could write to it outside of it
                parts = torch.zeros(
                    self.world_size + 1, CALL_ID_BYTES, dtype=torch.uint8, device=host
                )
            self._ids_round = self.gather(parts[1:], parts[0], host)
        self._ids_round.run(deadline)
        self.check_call_id()

    def check_call_id(self) -> None:
        """Raises OtherCall if a message of this call had another call id than this rank's.

        Every rank has seen the ids of all by then, so later sizes may differ from call to call.
        """
        self.replay.is_recording = False
        if self.call_id == OTHER_CALL:
            raise OtherCall

    def all_gather(self, receive: Tensor, send: Tensor, deadline: float) -> None:
        """`receive` becomes the concatenation of every rank's `send`, in rank order."""
        self._note(lambda link, x, end: link.all_gather(*x, end), receive, send)
        options = _with_timeout(AllgatherOptions(), deadline)
        with self.operation(f"all_gather of {send.nbytes} bytes from each rank"):
            source, target = self._stage(send), self._stage(receive, copy=False)
            work = getattr(self.group, _ALL_GATHER)(target.view(-1), source.view(-1), options)
            self._finish(work, receive, target, deadline)
        self.bytes_sent += (self.world_size - 1) * send.nbytes

    def all_to_all(self, receive: Tensor, send: Tensor, deadline: float) -> None:
        """Equal parts: `receive[r]` becomes what rank r has in its `send` for this rank."""
        self._note(lambda link, x, end: link.all_to_all(*x, end), receive, send)
        options = _with_timeout(AllToAllOptions(), deadline)
        num_bytes = send.nbytes // self.world_size
        with self.operation(f"all_to_all of {num_bytes} bytes to each rank"):
            source, target = self._stage(send), self._stage(receive, copy=False)
            work = getattr(self.group, _ALL_TO_ALL)(target, source, [], [], options)
            self._finish(work, receive, target, deadline)
        self.bytes_sent += send.nbytes - num_bytes

    def all_to_all_of(
        self, receive: list[Tensor], send: list[Tensor], device: torch.device, deadline: float
    ) -> Work | None:
        """Byte messages of any length on `device`, one for each rank and perhaps empty, uncounted.

        Over NCCL, which has to be waited for, a message goes where it belongs; over Gloo, which
        takes one tensor, by a copy.
        """
        options = _with_timeout(AllToAllOptions(), deadline)
        if device.type != "cpu":
            work: Work = self.group.alltoall(receive, send, options)
            return work
        sizes = [[tensor.numel() for tensor in tensors] for tensors in (receive, send)]
        target = torch.cat(receive)
        work = getattr(self.group, _ALL_TO_ALL)(target, torch.cat(send), *sizes, options)
        self.wait(work, device, deadline)
        for tensor, part in zip(receive, target.split(sizes[0]), strict=True):
            tensor.copy_(part)
        return None

    def all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType, deadline: float) -> None:
        """Reduces `tensor` over the ranks in place. Bytes are counted as a ring sends them."""
        self._note(lambda link, x, end: link.all_reduce(*x, op, end), tensor)
        options = _with_timeout(AllreduceOptions(), deadline)
        options.reduceOp = op
        with self.operation(f"all_reduce of {tensor.nbytes} bytes"):
            target = self._stage(tensor)
            work = self.group.allreduce([target], options)
            self._finish(work, tensor, target, deadline)
        self.bytes_sent += 2 * (self.world_size - 1) * tensor.nbytes // self.world_size

    def broadcast(self, tensor: Tensor, deadline: float) -> None:
        """`tensor` becomes rank 0's. Bytes are counted as a message to every rank."""
        self._note(lambda link, x, end: link.broadcast(*x, end), tensor)
        options = _with_timeout(BroadcastOptions(), deadline)
        options.rootRank = 0
        options.rootTensor = 0
        with self.operation(f"broadcast of {tensor.nbytes} bytes from rank 0"):
            target = self._stage(tensor)
            work = self.group.broadcast([target], options)
            self._finish(work, tensor, target, deadline)
        if self.rank == 0:
            self.bytes_sent += (self.world_size - 1) * tensor.nbytes

    def _note(self, step: Step, *tensors: Tensor) -> None:
        """Notes a step for a replay, unless it is over NCCL, whose receivers read no call id."""
        if self.replay.is_recording and self.transport_device(tensors[0].device).type == "cpu":
            self.replay.note(step, tensors)

    def start_shift(
        self, receive: Sequence[Tensor | None], send: Sequence[Tensor | None]
    ) -> list[Work]:
        """Starts sending `send` to the next rank and receiving `receive` from the previous one.

        Contiguous, in memory that `transport_device` names. None and empty tensors are not sent.
        """
        group = self.group
        arriving, leaving = _messages_of(receive), _messages_of(send)
        previous, following = self._neighbours()
        with self.operation("start of a shift"):
            try:
                operations = [
                    dist.P2POp(start, tensor, group=group, group_peer=peer, tag=tag)
                    for start, tensors, peer in (
                        (dist.isend, leaving, following),
                        (dist.irecv, arriving, previous),
                    )
                    for tag, tensor in enumerate(tensors, self.first_tag)
                ]
            except ValueError as error:  # as somebody else keeps the group
                raise RuntimeError("the process group was destroyed") from error
            works = dist.batch_isend_irecv(operations) if operations else []
        self.bytes_sent += sum(tensor.nbytes for tensor in leaving)
        return works

    def finish(self, works: list[Work], device: torch.device, deadline: float) -> None:
        """Waits for what `start_shift` started, and lets its tensors go."""
        start = time.perf_counter()
        previous, following = self._neighbours()
        for work in works:
            self.wait(work, device, deadline, f"shift from rank {previous} or to rank {following}")
        works.clear()
        self.seconds += time.perf_counter() - start

    def operation(self, name: str, is_counted: bool = True) -> AbstractContextManager[None]:
        """Counts and times what is done in it, and names it should it fail."""
        return _Operation(self, name, is_counted)

    def is_staged(self, device: torch.device) -> bool:
        """True where tensors of `device` travel through host memory."""
        return device.type != "cpu" and self._backends.get(device.type, "gloo") == "gloo"

    def transport_device(self, device: torch.device) -> torch.device:
        """Where tensors of `device` travel: NCCL alone, for one, moves none of the host's."""
        if self.is_staged(device):
            return torch.device("cpu")
        if device.type not in self._backends and "cuda" in self._backends:
            return torch.device("cuda", torch.cuda.current_device())
        return device

    def close(self) -> None:
        """Ends the operations under way, here and on the ranks that wait for this one.

        Gloo closes all connections of a group when a receive times out; there is no other way to
        reach ranks that are not next to the lost one before their own deadline.
        """
        for transport in self.transports:
            transport.close()
        group = self._group()
        if group is None or self._backends.get("cpu") != "gloo":
            return
        nothing = torch.empty(1, dtype=torch.uint8, device="cpu")
        for peer in range(self.world_size):
            if peer != self.rank:
                with suppress(RuntimeError):  # timed out, which closed all, or was closed before
                    group.recv([nothing], peer, _NOBODYS_TAG).wait(timedelta(milliseconds=1))

    @property
    def transports(self) -> list[DirectTransport]:
        """The open transports to other ranks, the nearest first."""
        both = self.shared_memory, self.sockets
        return [transport for transport in both if isinstance(transport, DirectTransport)]

    def is_group_alive(self) -> bool:
        """False once `destroy_process_group` was called, also while somebody holds the group."""
        group = self._group()
        return group is not None and group in dist.distributed_c10d._world.pg_map

    @property
    def group(self) -> dist.ProcessGroup:
        group = self._group()
        if group is None:
            raise RuntimeError("the process group was destroyed")
        return group

    def wait(
        self, work: Work | None, device: torch.device, deadline: float, name: str = ""
    ) -> None:
        """Waits for `work`; `name` of the awaited operation is for the error."""
        if work is None:
            return
        try:
            if device.type == "cpu":
                work.wait(remaining(deadline + _REPORT_SECONDS))
            else:
                work.wait()  # orders the stream; with a timeout it would block the host
        except RuntimeError as error:
            raise RuntimeError(f"{name}: {error}" if name else str(error)) from error

    def _neighbours(self) -> tuple[int, int]:
        return (self.rank - 1) % self.world_size, (self.rank + 1) % self.world_size

    def _stage(self, tensor: Tensor, copy: bool = True) -> Tensor:
        """The tensor, or memory in its place that can travel: with its values, or to receive in."""
        if self.is_staged(tensor.device):  # through buffers that stay, as all copies end at once
            name, num_bytes = "source" if copy else "target", tensor.nbytes
            buffer = self._host_buffers.get(name)
            if buffer is None or buffer.nbytes < num_bytes:
                buffer = self._host_buffers[name] = self.host_memory(num_bytes)
            staged = buffer[:num_bytes].view(tensor.dtype).view(tensor.shape)
        else:
            device = self.transport_device(tensor.device)
            if device == tensor.device:
                return tensor
            staged = torch.empty_like(tensor, device=device)
        return staged.copy_(tensor) if copy else staged

    def host_memory(self, num_bytes: int) -> Tensor:
        """New bytes in which a tensor of a device travels."""
        self.staged_bytes += num_bytes
        return host_memory(num_bytes)

    def free_staged(self) -> None:
        """Gives back the memory of `_stage`. Rounds give theirs back when they are dropped."""
        self._host_buffers.clear()
        self.staged_bytes = 0

    def _finish(self, work: Work | None, tensor: Tensor, staged: Tensor, deadline: float) -> None:
        self.wait(work, staged.device, deadline)
        if staged is not tensor:
            tensor.copy_(staged)


class _Operation(AbstractContextManager[None]):
    """Counts and times one operation of a link, and names it in an error.

    It is a class because a generator takes three times as long.
    """

    def __init__(self, link: Link, name: str, is_counted: bool) -> None:
        self._link, self._name, self._is_counted = link, name, is_counted

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        if isinstance(error, RuntimeError):
            raise RuntimeError(f"{self._name}: {error}") from error
        if error is None:
            self._link.num_operations += self._is_counted
            self._link.seconds += time.perf_counter() - self._start


def _messages_of(tensors: Sequence[Tensor | None]) -> list[Tensor]:
    """Tensors that are not empty; where torch counts messages, a byte for each other one too."""
    messages = [x for x in tensors if x is not None and x.numel()]
    if is_watched():
        device = next(x.device for x in tensors if x is not None)
        nothing = torch.empty(1, dtype=torch.uint8, device=device)
        messages += [nothing] * (len(tensors) - len(messages))
    return messages


def _with_timeout(options: _Options, deadline: float) -> _Options:
    options.timeout = remaining(deadline)
    options.asyncOp = False
    return options
