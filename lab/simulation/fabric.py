# SPDX-License-Identifier: BSD-3-Clause
"""Messages over links: when each starts, waits, leaves and arrives.

A discrete-event simulation whose events are processed a batch at a time, as arrays: a batch is one
message of some or of all ranks, such as a step of a ring. At a port, messages of an earlier batch
go first; those of one batch in the order in which they come.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
EVERYBODY = 1 << 40


@dataclass(frozen=True)
class Level:
    """The links between ranks that share a group of this level and none of a lower one."""

    ranks: int  # in a group: runs of so many; EVERYBODY at the top
    latency: float  # seconds from the first byte's departure to its arrival
    bandwidth: float  # bytes per second of a port, in each direction
    overhead: float = 0.0  # seconds of the sender's processor per message
    ranks_per_port: int = 1  # that share one, as the ranks of a node may share its NIC


@dataclass(frozen=True)
class SimulatedNetwork:
    """Links, and how a library uses them.

    Groups of level 0 have a fabric of their own. A message between higher groups passes the ports
    of levels 1, 2, ... up to the one where sender and receiver meet, and down again.
    """

    name: str
    levels: tuple[Level, ...]
    call: float = 0.0  # seconds of every rank's processor per collective
    round: float = 0.0  # and per round of messages to some ranks
    # Gloo: data leaves when the receiver has said that it waits for it.
    asks_first: bool = False
    chunks: int = 1  # of which a ring's messages consist, each on its way by itself
    tree: bool = False  # all-reduces by NCCL's tree instead of a ring
    # Strategies gather by a message to every rank, as this library does over Gloo.
    gathers_directly: bool = False

    def __post_init__(self) -> None:
        sizes = [level.ranks for level in self.levels]
        if sizes != sorted(set(sizes)) or not sizes or sizes[-1] != EVERYBODY:
            raise ValueError(f"levels must grow and end with EVERYBODY, got groups of {sizes}")


class Route:
    """One message each from `sources` to `targets`, prepared for any number of batches."""

    def __init__(self, levels: tuple[Level, ...], sources: Ints, targets: Ints) -> None:
        self.sources, self.targets = sources, targets
        # A slice of all ranks in order is quicker than their indices.
        is_everybody = np.array_equal(sources, np.arange(len(sources)))
        self.chosen = slice(len(sources)) if is_everybody else sources
        level = np.zeros(len(sources), dtype=np.int64)
        for i, group in enumerate(levels[:-1]):
            level[sources // group.ranks != targets // group.ranks] = i + 1
        self.latency = np.array([x.latency for x in levels])[level]
        self.overhead = np.array([x.overhead for x in levels])[level]
        self.bandwidth = np.array([x.bandwidth for x in levels])[level]
        self.outwards: list[_Passage] = []
        self.inwards: list[_Passage] = []
        for i, link in enumerate(levels):
            passing = level == 0 if i == 0 else level >= i
            if passing.any():
                ports = [ranks[passing] // link.ranks_per_port for ranks in (sources, targets)]
                self.outwards.append(_Passage(i, passing, ports[0], link.bandwidth))
                self.inwards.insert(0, _Passage(i, passing, ports[1], link.bandwidth))


class _Passage:
    """Some messages of a batch through the ports of one level, or other things in queues."""

    def __init__(
        self, level: int, passing: NDArray[np.bool_], ports: Ints, bandwidth: float = 0.0
    ) -> None:
        self.level, self.bandwidth, self.ports = level, bandwidth, ports
        self.chosen = slice(None) if passing.all() else np.flatnonzero(passing)
        self.users, self.counts = np.unique(ports, return_counts=True)
        self.is_alone = len(self.users) == len(ports)

    def start(self, free: Floats, ready: Floats, service: float | Floats) -> Floats:
        """When each message starts through its port, which is then taken for `service`."""
        if self.is_alone:
            result = np.maximum(ready, free[self.ports])
            free[self.ports] = result + service
            return result
        service = np.broadcast_to(service, ready.shape)
        order = np.lexsort((ready, self.ports))
        result = np.empty_like(ready)
        begin = 0
        if self.counts.min() == self.counts.max():
            rows = order.reshape(len(self.users), -1)
            self._queue(free, self.users, ready, service, rows, result)
        else:
            for user, count in zip(self.users, self.counts, strict=True):
                rows = order[None, begin : begin + count]
                self._queue(free, np.array([user]), ready, service, rows, result)
                begin += count
        return result

    @staticmethod
    def _queue(
        free: Floats, users: Ints, ready: Floats, service: Floats, rows: Ints, result: Floats
    ) -> None:
        """One queue per row: a message starts when it is there and all before it are through."""
        earliest = np.maximum(ready[rows], free[users][:, None])
        through = np.cumsum(service[rows], axis=1)
        before = through - service[rows]
        begin = np.maximum.accumulate(earliest - before, axis=1) + before
        result[rows] = begin
        free[users] = begin[:, -1] + service[rows[:, -1]]


class Fabric:
    """The ranks' clocks, the ports' queues, and counters of what was sent."""

    def __init__(self, network: SimulatedNetwork, world_size: int) -> None:
        self.network, self.world_size = network, world_size
        self.ranks = np.arange(world_size)
        self.now = np.zeros(world_size)
        self.bytes_sent = np.zeros(world_size, dtype=np.int64)
        self.messages_sent = np.zeros(world_size, dtype=np.int64)
        ports = [-(-world_size // level.ranks_per_port) for level in network.levels]
        self._outwards = [np.zeros(n) for n in ports]
        self._inwards = [np.zeros(n) for n in ports]
        self.to_next = self.route(self.ranks, (self.ranks + 1) % world_size)

    def route(self, sources: Ints, targets: Ints) -> Route:
        """A source occurs once."""
        return Route(self.network.levels, sources, targets)

    def work(self, seconds: float | NDArray[Any]) -> None:
        """Every rank's processor is busy."""
        self.now += seconds

    def send(
        self,
        route: Route,
        num_bytes: int | Ints,
        awaited: Floats | None = None,
    ) -> tuple[Floats, Floats]:
        """Sends when the sources are ready; returns when each message left and when it arrived.

        Args:
            awaited: since when each rank waits for its message, where the library asks first.
        """
        chosen = route.chosen
        self.now[chosen] += route.overhead
        self.bytes_sent[chosen] += num_bytes
        self.messages_sent[chosen] += 1
        time = self.now[chosen].copy()
        if self.network.asks_first and awaited is not None:
            time = np.maximum(time, awaited[route.targets] + route.latency)
        left = self._pass(route.outwards, self._outwards, time, time, num_bytes)
        last = left
        time, last = time + route.latency, last + route.latency
        return left, self._pass(route.inwards, self._inwards, time, last, num_bytes)

    @staticmethod
    def _pass(
        passages: list[_Passage],
        ports: list[Floats],
        first: Floats,
        last: Floats,
        num_bytes: int | Ints,
    ) -> Floats:
        """When last bytes are through; first bytes move on at once, and `first` becomes theirs."""
        last = last.copy()
        for passage in passages:
            chosen = passage.chosen
            sizes = num_bytes[chosen] if isinstance(num_bytes, np.ndarray) else num_bytes
            service = sizes / passage.bandwidth
            start = passage.start(ports[passage.level], first[chosen], service)
            first[chosen] = start
            last[chosen] = np.maximum(last[chosen], start + service)
        return last

    def received(self, route: Route, arrived: Floats) -> Floats:
        """The latest arrival at each rank; -inf where there is none."""
        result = np.full(self.world_size, -np.inf)
        np.maximum.at(result, route.targets, arrived)
        return result

    def wait(self, times: Floats) -> None:
        self.now = np.maximum(self.now, times)
