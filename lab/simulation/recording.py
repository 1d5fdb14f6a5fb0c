# SPDX-License-Identifier: BSD-3-Clause
"""Messages of a strategy on every rank, as seen by a link that records instead of sending.

Each rank's own `prepare` and exchange run, on tensors of the meta device, which have sizes and no
memory. So the simulator knows every strategy by its file alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tree_attention.exchange.strategies import Context, Strategy
from tree_attention.exchange.transport.buffers import CALL_ID_BYTES, Arena, State, StateLayout
from tree_attention.exchange.transport.messages import SAME_CALL
from tree_attention.exchange.transport.process_group import Link
from tree_attention.exchange.transport.topology import Topology

from .collectives import Batch
from .fabric import Ints

META = torch.device("meta")


@dataclass(frozen=True)
class Operation:
    """Step of one rank: local work, then something with the other ranks.

    Attributes:
        name: method of the link, or "post", or "return" at the end.
        round_idx: number of the prepared round that is posted or run.
        num_bytes: size in bytes of what a collective operation sends to each rank, or reduces.
        messages: `(rank, bytes)` in the order in which they are sent.
        kernels, local_bytes: operations on tensors since the last one, and the bytes that these
            read and wrote.
    """

    name: str
    round_idx: int = -1
    num_bytes: int = 0
    messages: tuple[tuple[int, int], ...] = ()
    kernels: int = 0
    local_bytes: int = 0


class RecordingLink:
    """The methods of `Link` that strategies call, for one rank of a world that does not exist."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.operations: list[Operation] = []
        self.local_work = _LocalWork()
        self.call_id = SAME_CALL
        self._num_rounds = 0

    def transport_device(self, device: torch.device) -> torch.device:
        return device

    def gather(self, receive: Tensor, send: Tensor, device: torch.device, tag: int = 0) -> _Round:
        return self._round(Operation("gather", num_bytes=send.nbytes - CALL_ID_BYTES))

    def transpose(
        self, receive: Tensor, send: Tensor, device: torch.device, tag: int = 0
    ) -> _Round:
        return self._round(Operation("all_to_all", num_bytes=send[0].nbytes - CALL_ID_BYTES))

    def messages(
        self,
        receive: Mapping[int, Tensor],
        send: Mapping[int, Tensor],
        device: torch.device,
        tag: int = 0,
    ) -> _Round:
        # As `Messages` does: the next rank comes first.
        ranks = sorted(send, key=lambda rank: (rank - self.rank) % self.world_size)
        sizes = tuple(
            (rank, send[rank].nbytes - CALL_ID_BYTES) for rank in ranks if rank != self.rank
        )
        return self._round(Operation("messages", messages=sizes))

    def all_gather(self, receive: Tensor, send: Tensor, deadline: float) -> None:
        self.record(Operation("all_gather", num_bytes=send.nbytes))

    def all_to_all(self, receive: Tensor, send: Tensor, deadline: float) -> None:
        self.record(Operation("all_to_all", num_bytes=send[0].nbytes))

    def all_reduce(self, tensor: Tensor, op: object, deadline: float) -> None:
        self.record(Operation("all_reduce", num_bytes=tensor.nbytes))

    def record(self, operation: Operation) -> None:
        work = self.local_work
        self.operations.append(replace(operation, kernels=work.kernels, local_bytes=work.num_bytes))
        work.kernels = work.num_bytes = 0

    def _round(self, operation: Operation) -> _Round:
        self._num_rounds += 1
        return _Round(self, replace(operation, round_idx=self._num_rounds - 1))


@dataclass(frozen=True)
class _Round:
    link: RecordingLink
    operation: Operation

    def post(self) -> None:
        self.link.record(Operation("post", self.operation.round_idx))

    def run(self, deadline: float) -> None:
        self.link.record(self.operation)


class _LocalWork(TorchDispatchMode):
    """Counts the operations that write to tensors, and the bytes of all their tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels = self.num_bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func._schema.is_mutable:
            tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
            self.kernels += 1
            self.num_bytes += sum(tensor.nbytes for tensor in tensors)
        return func(*args, **(kwargs or {}))


class _CountingArena(Arena):
    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[str, int] = {}

    def bytes(self, name: str, num_bytes: int, device: torch.device) -> Tensor:
        self.sizes[name] = max(num_bytes, self.sizes.get(name, 0))
        return super().bytes(name, num_bytes, device)


@dataclass(frozen=True)
class Step:
    """The operations of all ranks that are of one kind and belong together."""

    name: str
    round_idx: int
    num_bytes: int
    batches: list[Batch] = field(repr=False)
    kernels: Ints  # by rank
    local_bytes: Ints  # by rank


@dataclass(frozen=True)
class Program:
    """An exchange of a whole world: its steps, and the bytes of each rank's buffers."""

    steps: list[Step]
    buffer_bytes: Ints


@lru_cache(maxsize=256)
def program_of(
    strategy: Strategy, layout: StateLayout, topology: Topology, out_dtype: torch.dtype
) -> Program:
    """Records the exchange of states of `layout` on every rank.

    Raises:
        ValueError: the ranks do not call the same operations, as the contract of strategies says.
    """
    recordings, sizes = [], []
    for rank in range(topology.world_size):
        operations, buffer_bytes = _record(strategy, layout, topology, out_dtype, rank)
        recordings.append(operations)
        sizes.append(buffer_bytes)
    steps = []
    for index, together in enumerate(zip(*recordings, strict=True)):
        kinds = {(one.name, one.round_idx, one.num_bytes) for one in together}
        if len(kinds) > 1:
            raise ValueError(f"operation {index} is not the same on all ranks: {sorted(kinds)}")
        ((name, round_idx, num_bytes),) = kinds
        kernels, local_bytes = (
            np.array([getattr(one, count) for one in together])
            for count in ("kernels", "local_bytes")
        )
        batches = _batches([one.messages for one in together])
        steps.append(Step(name, round_idx, num_bytes, batches, kernels, local_bytes))
    return Program(steps, np.array(sizes))


def _record(
    strategy: Strategy,
    layout: StateLayout,
    topology: Topology,
    out_dtype: torch.dtype,
    rank: int,
) -> tuple[list[Operation], int]:
    """The operations of one rank, and the bytes of its buffers."""
    link, arena = RecordingLink(rank, topology.world_size), _CountingArena()
    send = arena.bytes("send", layout.message_bytes, META)
    state = State(layout, META, send, *layout.views(send), arena)
    exchange = strategy.prepare(Context(cast(Link, link), topology, state, out_dtype))
    o = torch.empty((*layout.shape, layout.head_dim), dtype=out_dtype, device=META)
    lse = torch.empty(layout.shape, device=META)
    with link.local_work:
        exchange(math.inf, o, lse)
    link.record(Operation("return"))
    return link.operations, sum(arena.sizes.values())


def _batches(messages: list[tuple[tuple[int, int], ...]]) -> list[Batch]:
    """First the first messages of all ranks, then the second ones, and so on."""
    result: list[Batch] = []
    for turn in range(max(map(len, messages))):
        sources = [rank for rank, sent in enumerate(messages) if turn < len(sent)]
        targets, sizes = np.array([messages[rank][turn] for rank in sources]).T
        result.append((np.array(sources), targets, sizes))
    return result
