# SPDX-License-Identifier: BSD-3-Clause
"""Collectives as Gloo and NCCL run them, message by message."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

import numpy as np

from .fabric import Fabric, Floats, Ints

# What NCCL's tree pipelines: a rank passes on one such piece while it receives the next.
_PIECE = 32 << 10


def all_gather(fabric: Fabric, num_bytes: int) -> None:
    """`num_bytes` of each rank become everybody's."""
    _ring(fabric, [num_bytes] * (fabric.world_size - 1))


def all_reduce(fabric: Fabric, num_bytes: int) -> None:
    if fabric.network.tree:
        _tree(fabric, num_bytes)
        return
    # The parts of a reduce-scatter and an all-gather, as equal as whole bytes can be.
    world_size = fabric.world_size
    bounds = [step * num_bytes // world_size for step in range(2 * world_size - 1)]
    _ring(fabric, [end - begin for begin, end in pairwise(bounds)])


def all_to_all(fabric: Fabric, num_bytes: int) -> None:
    """`num_bytes` from each rank to each other one, beginning with the next."""
    fabric.work(fabric.network.call)
    _direct(fabric, to_everybody(fabric, num_bytes), awaited=fabric.now.copy())


# Messages of one batch: sources, of which none occurs twice, their targets and sizes in bytes.
Batch = tuple[Ints, Ints, int | Ints]


def messages(fabric: Fabric, batches: Iterable[Batch], awaited: Floats | None = None) -> None:
    """Each rank sends one batch after the other, then waits for what it sent and what it gets.

    Args:
        awaited: since when each rank waits for messages; None: from now on.
    """
    awaited = fabric.now.copy() if awaited is None else awaited
    fabric.work(fabric.network.round)
    _direct(fabric, batches, awaited)


def to_everybody(fabric: Fabric, num_bytes: int) -> Iterator[Batch]:
    """A message from each rank to every other one, to the next rank first."""
    for distance in range(1, fabric.world_size):
        yield fabric.ranks, (fabric.ranks + distance) % fabric.world_size, num_bytes


def _direct(fabric: Fabric, batches: Iterable[Batch], awaited: Floats) -> None:
    finished = fabric.now.copy()
    for sources, targets, num_bytes in batches:
        route = fabric.route(sources, targets)
        left, arrived = fabric.send(route, num_bytes, awaited)
        finished[sources] = np.maximum(finished[sources], left)
        finished = np.maximum(finished, fabric.received(route, arrived))
    fabric.wait(finished)


def shift(fabric: Fabric, sizes: Sequence[Ints]) -> Floats:
    """Starts sending to the next rank: the i-th message of rank r has `sizes[i][r]` bytes.

    Returns when each rank has sent its own and received the previous one's. Empty ones stay home.
    """
    fabric.work(fabric.network.round)
    awaited, finished = fabric.now.copy(), fabric.now.copy()
    for size in sizes:
        route = fabric.to_next
        if not size.all():
            sources = np.flatnonzero(size)
            route = fabric.route(sources, (sources + 1) % fabric.world_size)
        left, arrived = fabric.send(route, size[route.sources], awaited)
        finished[route.sources] = np.maximum(finished[route.sources], left)
        finished = np.maximum(finished, fabric.received(route, arrived))
    return finished


def _ring(fabric: Fabric, sizes: Sequence[int]) -> None:
    """Each step passes on what the step before it brought."""
    fabric.work(fabric.network.call)
    chunks = fabric.network.chunks
    ready = [fabric.now.copy() for _ in range(chunks)]
    for size in sizes:
        for chunk in range(chunks):
            # One thread serves all chunks, in turns.
            fabric.wait(ready[chunk])
            part = (chunk + 1) * size // chunks - chunk * size // chunks
            left, arrived = fabric.send(fabric.to_next, part, awaited=fabric.now.copy())
            ready[chunk] = np.maximum(left, np.roll(arrived, 1))
    for times in ready:
        fabric.wait(times)


def _tree(fabric: Fabric, num_bytes: int) -> None:
    """Up a chain inside each node and a binary tree of their first ranks, and down again."""
    fabric.work(fabric.network.call)
    world_size = fabric.world_size
    parent = np.full(world_size, -1)
    node = min(fabric.network.levels[0].ranks, world_size)
    if len(fabric.network.levels) == 1:
        node = world_size
    heads = fabric.ranks % node == 0
    parent[~heads] = fabric.ranks[~heads] - 1
    index = fabric.ranks[heads] // node
    parent[heads] = np.where(index > 0, (index - 1) // 2 * node, -1)
    depth = np.zeros(world_size, dtype=np.int64)
    for rank in range(1, world_size):
        depth[rank] = depth[parent[rank]] + 1
    rounds = _rounds_by_depth(parent, depth, node)
    count = max(1, -(-num_bytes // _PIECE))
    bounds = [i * num_bytes // count for i in range(count + 1)]
    sizes = [end - begin for begin, end in pairwise(bounds)]
    # A rank's clock at the reduction of one piece and the distribution of another are its own.
    at_root = []
    for size in sizes:
        ready = fabric.now.copy()
        for children, parents in reversed(rounds):
            _hop(fabric, ready, children, parents, size)
        at_root.append(ready[0])
    finished = fabric.now.copy()
    for size, begin in zip(sizes, at_root, strict=True):
        ready = np.full(world_size, begin)
        for children, parents in rounds:
            _hop(fabric, ready, parents, children, size)
        finished = np.maximum(finished, ready)
    fabric.now = finished


def _rounds_by_depth(parent: Ints, depth: Ints, node: int) -> list[tuple[Ints, Ints]]:
    """Edges (children, parents) from the root down; no rank occurs twice on either side."""
    rounds = []
    for level in range(1, int(depth.max(initial=0)) + 1):
        at_level = np.flatnonzero(depth == level)
        heads = at_level[at_level % node == 0]
        for children in (at_level[at_level % node != 0], heads[::2], heads[1::2]):
            if len(children):
                rounds.append((children, parent[children]))
    return rounds


def _hop(fabric: Fabric, ready: Floats, sources: Ints, targets: Ints, size: int) -> None:
    clock, fabric.now = fabric.now, ready.copy()
    _, arrived = fabric.send(fabric.route(sources, targets), size)
    fabric.now = clock
    ready[targets] = np.maximum(ready[targets], arrived)
