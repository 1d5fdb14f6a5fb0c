# SPDX-License-Identifier: BSD-3-Clause
"""Steps of every rank in `ring_decode` and `ring_pass_q_decode`: messages, copies and
merges in their order, with the bytes and the memory that these take."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from tree_attention.baselines import MANIFEST_BYTES, aligned, parts_of
from tree_attention.exchange.transport.buffers import CALL_ID_BYTES, StateLayout

from .clusters import SimulatedCluster
from .collectives import all_gather, shift
from .fabric import Fabric, Floats, Ints
from .problem import Problem

RING, RING_PASS_Q = "ring", "ring, passing queries"


@dataclass(frozen=True)
class SimulatedRanks:
    """All ranks of a world in step, as far as their messages let them."""

    problem: Problem
    cluster: SimulatedCluster
    fabric: Fabric

    @property
    def world_size(self) -> int:
        return self.fabric.world_size

    def attend(self, share: float | Floats = 1.0) -> None:
        """Every rank attends to a share of its shard's keys and values."""
        seconds = share * (self.problem.kv_bytes / self.cluster.key_bandwidth)
        self.fabric.work(self.cluster.local_operation + seconds)

    def local(self, kernels: int | Ints, num_bytes: int | Ints) -> None:
        """Every rank's own work on tensors: so many kernels, which read and write so many bytes."""
        cluster = self.cluster
        self.fabric.work(kernels * cluster.local_operation + num_bytes / cluster.local_bandwidth)

    def begin(self) -> None:
        self.fabric.work(self.cluster.exchange)


def _run_ring(ranks: SimulatedRanks) -> None:
    fabric, world_size = ranks.fabric, ranks.world_size
    ranks.begin()
    all_gather(fabric, MANIFEST_BYTES)
    half = np.full(world_size, ranks.problem.kv_bytes // 2)
    for hop in range(world_size):
        is_last = hop == world_size - 1
        arrived = fabric.now if is_last else shift(fabric, [half, half])  # keys, values
        ranks.attend()
        fabric.wait(arrived)
    ranks.local(1, world_size * ranks.problem.layout.num_bytes)


def _ring_bytes_sent(problem: Problem, world_size: int) -> int:
    return (world_size - 1) * (problem.kv_bytes + MANIFEST_BYTES)


def _ring_memory(problem: Problem, world_size: int) -> int:
    """Shards that arrive and leave, and a state for each."""
    return min(2, world_size - 1) * problem.kv_bytes + world_size * problem.layout.message_bytes


@dataclass(frozen=True)
class _Parts:
    """Return the bytes that travel for each part of the queries."""

    queries: Ints
    states: Ints
    result: int  # of the largest part
    share: Floats  # of a shard that the part reads

    @staticmethod
    def of(problem: Problem, world_size: int) -> _Parts:
        shape = (problem.batch, problem.heads[0], 1, problem.head_dim)
        q = torch.empty(shape, dtype=problem.dtype, device="meta")
        shapes = [q[part[:2]].shape for part in parts_of(q, problem.heads[1], world_size)]
        states = [StateLayout(shape[:3], problem.head_dim, torch.float32) for shape in shapes]
        rows = np.array([layout.num_rows for layout in states])
        return _Parts(
            np.array([math.prod(shape) * problem.dtype.itemsize for shape in shapes]),
            np.array([layout.num_bytes for layout in states]),
            max(replace(layout, dtype=problem.dtype).num_bytes for layout in states),
            rows / rows.sum(),
        )


def _run_ring_pass_q(ranks: SimulatedRanks) -> None:
    fabric, world_size = ranks.fabric, ranks.world_size
    parts = _Parts.of(ranks.problem, world_size)
    ranks.begin()
    coming = fabric.now.copy()
    for hop in range(world_size):
        index = (fabric.ranks - hop) % world_size  # of the part that a rank has
        fabric.wait(coming)
        if hop < world_size - 1:
            coming = shift(fabric, [parts.queries[index]])
        if hop == 0:
            ranks.attend(parts.share[index])
            continue
        states = shift(fabric, [parts.states[(index + 1) % world_size]])
        ranks.attend(parts.share[index])
        fabric.wait(states)
        ranks.local(1, int(2 * parts.states.max()))
    all_gather(fabric, parts.result)


def _ring_pass_q_bytes_sent(problem: Problem, world_size: int) -> int:
    parts = _Parts.of(problem, world_size)
    # A rank passes on the queries and the state of every part but two each.
    sums = parts.queries.sum() - np.roll(parts.queries, -1)
    sums += parts.states.sum() - np.roll(parts.states, -1)
    return int(sums.max()) + (world_size - 1) * parts.result


def _ring_pass_q_memory(problem: Problem, world_size: int) -> int:
    parts = _Parts.of(problem, world_size)
    queries, state = aligned(int(parts.queries.max())), aligned(int(parts.states.max()))
    # Queries with a state leave and arrive, and a state is merged from a pair.
    return 2 * (queries + state) + 2 * state + (1 + world_size) * (parts.result + CALL_ID_BYTES)


@dataclass(frozen=True)
class Ring:
    run: Callable[[SimulatedRanks], None]
    bytes_sent: Callable[[Problem, int], int]  # of the busiest rank in a world of so many
    memory: Callable[[Problem, int], int]  # bytes of its buffers, without the state and the outputs


RINGS = {
    RING: Ring(_run_ring, _ring_bytes_sent, _ring_memory),
    RING_PASS_Q: Ring(_run_ring_pass_q, _ring_pass_q_bytes_sent, _ring_pass_q_memory),
}
