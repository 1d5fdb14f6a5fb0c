# SPDX-License-Identifier: BSD-3-Clause
"""What every rank does in a decoding step, for each strategy and both rings.

Each program follows the one of the same name in `tree_attention.exchange` (or `ring_decode`,
`ring_pass_q_decode`) line by line: the same messages of the same sizes in the same order, the
same copies and merges. `bytes_of_formula` is what the library itself says about the bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import numpy as np
import torch

from tree_attention.exchange.butterfly import levels
from tree_attention.exchange.chunks import Chunks
from tree_attention.exchange.slices import Slices
from tree_attention.exchange.state import Message
from tree_attention.exchange.strategies import strategies
from tree_attention.exchange.topology import Topology
from tree_attention.exchange.traffic import Case, traffic
from tree_attention.ring import MANIFEST_BYTES
from tree_attention.ring_pass_q import _deal

from .clusters import Cluster
from .collectives import all_gather, all_reduce, all_to_all, messages, shift, to_everybody
from .fabric import Fabric, Floats, Ints, Network

RING, RING_PASS_Q = "ring", "ring, passing queries"
# Not in the library: what hierarchical would gain where nodes are many.
NODES_IN_PAIRS = "hierarchical, nodes in pairs"


def ways() -> tuple[str, ...]:
    return (*strategies(), RING, RING_PASS_Q)


@dataclass(frozen=True)
class Problem:
    """One query token per sequence; every rank holds `keys_per_rank` keys of each."""

    keys_per_rank: int
    batch: int = 1
    heads: tuple[int, int] = (32, 8)
    head_dim: int = 128
    dtype: torch.dtype = torch.bfloat16

    @property
    def message(self) -> Message:
        return Message((self.batch, self.heads[0], 1), self.head_dim, torch.float32)

    @property
    def kv_bytes(self) -> int:
        """Of one shard."""
        size = self.batch * self.heads[1] * self.keys_per_rank * self.head_dim
        return 2 * size * self.dtype.itemsize


@dataclass(frozen=True)
class Run:
    """One simulated decoding step."""

    seconds: float  # from the last rank's start until the last one has the result
    bytes_sent: Ints  # by rank
    messages_sent: Ints
    network: str


def simulate(
    way: str, problem: Problem, cluster: Cluster, world_size: int, overlapped: bool = False
) -> Run:
    """By the fastest of the ways in which the cluster's library may move the messages.

    `overlapped`: a tree's exchanges go on while it attends, as `tree_decode(overlap=True)` does.
    """
    runs = []
    for network in cluster.networks:
        if network.tree and way not in ("three_allreduce", "max_then_sum"):
            continue  # nothing in it would be another
        ranks = _Ranks(problem, cluster, network, world_size)
        if way in _RINGS:
            _RINGS[way](ranks)
        else:
            (_overlap if overlapped else _attend_first)(ranks, _EXCHANGES[way])
        fabric = ranks.fabric
        seconds = float(fabric.now.max()) - (fabric.last_start or 0.0)
        runs.append(Run(seconds, fabric.bytes_sent, fabric.messages_sent, network.name))
    return min(runs, key=lambda run: run.seconds)


def bytes_of_formula(way: str, problem: Problem, topology: Topology) -> int:
    """Bytes that the busiest rank sends, by the formulas of the library's cost model."""
    world_size = topology.world_size
    if way == RING:
        return (world_size - 1) * (problem.kv_bytes + MANIFEST_BYTES)
    if way == RING_PASS_Q:
        parts = Parts.of(problem, world_size)
        # A rank passes on the queries and the state of every part but two each.
        sums = parts.queries.sum() - np.roll(parts.queries, -1)
        sums += parts.states.sum() - np.roll(parts.states, -1)
        return int(sums.max()) + (world_size - 1) * parts.result
    return traffic(way, Case(topology, problem.message, problem.dtype)).bytes_sent


class _Ranks:
    """All ranks of a world in step, as far as their messages let them."""

    def __init__(
        self, problem: Problem, cluster: Cluster, network: Network, world_size: int
    ) -> None:
        self.problem, self.cluster, self.world_size = problem, cluster, world_size
        self.fabric = Fabric(network, world_size, cluster.processors)
        self.topology = cluster.topology(world_size)
        self.message = problem.message
        self.out_dtype = problem.dtype

    def attend(self, share: float | np.ndarray = 1.0) -> None:
        """To a share of a shard's keys and values."""
        self.fabric.work(self.cluster.local_operation)
        self.fabric.now += np.asarray(share) * self.problem.kv_bytes / self.cluster.key_bandwidth

    def local(self, operations: int, num_bytes: int) -> None:
        cluster = self.cluster
        self.fabric.work(operations * cluster.local_operation + num_bytes / cluster.local_bandwidth)

    def begin(self) -> None:
        self.fabric.work(self.cluster.exchange)


def _all_gather(ranks: _Ranks) -> None:
    num_bytes = ranks.message.num_bytes
    _gather(ranks.fabric, num_bytes)
    ranks.local(1, ranks.world_size * num_bytes)


def _gather(fabric: Fabric, num_bytes: int, awaited: Floats | None = None) -> None:
    if fabric.network.gathers_directly:
        messages(fabric, to_everybody(fabric), num_bytes, awaited)
    else:
        all_gather(fabric, num_bytes)


def _two_phase(ranks: _Ranks) -> None:
    slices = Slices.of_rows(ranks.message, ranks.world_size)
    results = slices.to(ranks.out_dtype)
    awaited = ranks.fabric.now.copy()  # of the results: receives are posted before all else
    ranks.local(2, slices.num_bytes)
    all_to_all(ranks.fabric, slices.message.num_bytes)
    ranks.local(1, slices.num_bytes)
    _gather(ranks.fabric, results.message.num_bytes, awaited)
    ranks.local(2, results.num_bytes)


def _hierarchical(ranks: _Ranks, in_pairs: bool = False) -> None:
    fabric, size = ranks.fabric, ranks.topology.subtree_size
    num_subtrees = ranks.world_size // size
    if size == 1:
        (_butterfly if in_pairs else _all_gather)(ranks)
        return
    slices = Slices.of_rows(ranks.message, size)
    merged = replace(slices.message, dtype=torch.float32)
    results = slices.to(ranks.out_dtype)
    awaited = fabric.now.copy()  # of all steps: receives are posted before anything else
    ranks.local(2, slices.num_bytes)
    messages(fabric, to_everybody(fabric, 1, size), slices.message.num_bytes, awaited)
    ranks.local(1, slices.num_bytes)
    if in_pairs:
        _levels(ranks, size, num_subtrees, merged.num_bytes, awaited)
    elif num_subtrees > 1:
        messages(fabric, to_everybody(fabric, size, num_subtrees), merged.num_bytes, awaited)
        ranks.local(1, num_subtrees * merged.num_bytes)
    messages(fabric, to_everybody(fabric, 1, size), results.message.num_bytes, awaited)
    ranks.local(2, results.num_bytes)


def _butterfly(ranks: _Ranks) -> None:
    awaited = ranks.fabric.now.copy()
    ranks.local(1, ranks.message.num_bytes)
    _levels(ranks, 1, ranks.world_size, ranks.message.num_bytes, awaited)


def _levels(ranks: _Ranks, stride: int, count: int, num_bytes: int, awaited: Floats) -> None:
    """Butterflies of `count` ranks, `stride` apart, whose states have `num_bytes`."""
    places = ranks.fabric.ranks // stride % count
    first = ranks.fabric.ranks - places * stride
    steps = [{step.level: step for step in levels(place, count)} for place in range(count)]
    for level in range((count - 1).bit_length()):
        pairs: dict[int, list[tuple[int, int]]] = {}  # by their turn
        for rank, place in enumerate(places):
            readers = steps[place][level].readers if level in steps[place] else ()
            for turn, reader in enumerate(readers):
                pairs.setdefault(turn, []).append((rank, first[rank] + reader * stride))
        batches = [np.array(pairs[turn]).T for turn in sorted(pairs)]
        messages(ranks.fabric, [(a, b) for a, b in batches], num_bytes, awaited)
        merging = np.array([level in steps[place] for place in places])
        reading = 2 * num_bytes / ranks.cluster.local_bandwidth
        ranks.fabric.work(merging * (ranks.cluster.local_operation + reading))


def _three_allreduce(ranks: _Ranks) -> None:
    rows = 4 * ranks.message.num_rows
    _sums(ranks, rows, ranks.message.o_bytes)


def _max_then_sum(ranks: _Ranks) -> None:
    _sums(ranks, ranks.message.num_bytes)


def _sums(ranks: _Ranks, *packed: int) -> None:
    num_bytes = ranks.message.num_bytes
    all_reduce(ranks.fabric, 4 * ranks.message.num_rows)
    ranks.local(4, 2 * num_bytes)
    for size in packed:
        all_reduce(ranks.fabric, size)
    ranks.local(2, 2 * num_bytes)


def _ring(ranks: _Ranks) -> None:
    fabric, world_size = ranks.fabric, ranks.world_size
    ranks.begin()
    if world_size > 1:
        all_gather(fabric, MANIFEST_BYTES)
    half = np.full(world_size, ranks.problem.kv_bytes // 2)
    for hop in range(world_size):
        is_last = hop == world_size - 1
        arrived = fabric.now if is_last else shift(fabric, [half, half])  # keys, values
        ranks.attend()
        fabric.wait(arrived, 0 if is_last else 2, posted=True)
    ranks.local(1, world_size * ranks.message.num_bytes)


@dataclass(frozen=True)
class Parts:
    """What travels for each part of the queries, in bytes."""

    queries: Ints
    states: Ints
    result: int  # of the largest part
    share: np.ndarray  # of a shard that the part reads

    @staticmethod
    def of(problem: Problem, world_size: int) -> Parts:
        shape = (problem.batch, problem.heads[0], 1, problem.head_dim)
        q = torch.empty(shape, dtype=problem.dtype, device="meta")
        shapes = [part.shape(q) for part in _deal(q, problem.heads[1], world_size)]
        states = [Message(shape[:3], problem.head_dim, torch.float32) for shape in shapes]
        rows = np.array([message.num_rows for message in states])
        return Parts(
            np.array([math.prod(shape) * problem.dtype.itemsize for shape in shapes]),
            np.array([message.num_bytes for message in states]),
            max(replace(message, dtype=problem.dtype).num_bytes for message in states),
            rows / rows.sum(),
        )


def _ring_pass_q(ranks: _Ranks) -> None:
    fabric, world_size = ranks.fabric, ranks.world_size
    parts = Parts.of(ranks.problem, world_size)
    ranks.begin()
    coming = fabric.now.copy()
    for hop in range(world_size):
        index = (fabric.ranks - hop) % world_size  # of the part that a rank has
        fabric.wait(coming, int(hop > 0), posted=True)
        if hop < world_size - 1:
            coming = shift(fabric, [parts.queries[index]])
        if hop == 0:
            ranks.attend(parts.share[index])
            continue
        states = shift(fabric, [parts.states[(index + 1) % world_size]])
        ranks.attend(parts.share[index])
        fabric.wait(states, 1, posted=True)
        ranks.local(1, int(2 * parts.states.max()))
    all_gather(fabric, parts.result)


Program = Callable[[_Ranks], None]


def _attend_first(ranks: _Ranks, exchange: Program) -> None:
    ranks.attend()
    ranks.begin()
    exchange(ranks)


def _overlap(ranks: _Ranks, exchange: Program) -> None:
    """One exchange after the other, each from when its chunk is computed."""
    whole = ranks.message
    chunks = chunks_of(ranks.problem)
    computed = ranks.fabric.now.copy()
    for begin, end in pairwise(chunks.bounds):
        share = (end - begin) / chunks.bounds[-1]
        computed += ranks.cluster.local_operation
        computed += share * ranks.problem.kv_bytes / ranks.cluster.key_bandwidth
        ranks.fabric.wait(computed)
        shape = list(whole.shape)
        shape[chunks.axis] = round(share * shape[chunks.axis])
        ranks.message = replace(whole, shape=tuple(shape))
        ranks.begin()
        exchange(ranks)


def chunks_of(problem: Problem) -> Chunks:
    """Into which the library cuts a call whose exchanges overlap."""
    return Chunks.of(problem.message, problem.heads[1])


_EXCHANGES: dict[str, Program] = {
    "all_gather": _all_gather,
    "two_phase": _two_phase,
    "hierarchical": _hierarchical,
    "butterfly": _butterfly,
    NODES_IN_PAIRS: partial(_hierarchical, in_pairs=True),
    "three_allreduce": _three_allreduce,
    "max_then_sum": _max_then_sum,
}
_RINGS: dict[str, Program] = {RING: _ring, RING_PASS_Q: _ring_pass_q}
