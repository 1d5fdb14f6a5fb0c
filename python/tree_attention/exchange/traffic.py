# SPDX-License-Identifier: BSD-3-Clause
"""What each strategy does for a state: steps, bytes and local work, from sizes alone.

A step is a message that waits for the one before it. Collectives are modelled as the libraries run
them: all-gathers and all-reduces as rings, all-to-alls and messages directly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, dataclass, replace

import torch

from .butterfly import levels
from .slices import Slices
from .state import Message
from .topology import Topology


@dataclass(frozen=True)
class Traffic:
    """The work of the busiest rank; each count has a cost in `Costs`."""

    exchanges: int = 0
    collectives: int = 0
    messages: int = 0  # sent one by one, rather than by a collective
    steps_inside: int = 0  # a node
    bytes_inside: int = 0
    steps_between: int = 0  # nodes
    bytes_between: int = 0
    local_operations: int = 0  # merges and copies
    local_bytes: int = 0  # that they read

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    @property
    def bytes_sent(self) -> int:
        return self.bytes_inside + self.bytes_between


@dataclass(frozen=True)
class Case:
    """What is exchanged, and among whom."""

    topology: Topology
    message: Message  # of the whole state, as ranks send it
    out_dtype: torch.dtype
    head_sharded: bool = False


def traffic(strategy: str, case: Case) -> Traffic:
    return Traffic(exchanges=1) + _OF_STRATEGY[strategy](case)


def ring(topology: Topology, num_bytes: int) -> Traffic:
    """An all-gather of `num_bytes` from each rank: all of it goes through every link."""
    return _ring(topology, topology.world_size - 1, (topology.world_size - 1) * num_bytes)


def all_reduce(topology: Topology, num_bytes: int) -> Traffic:
    """A reduce-scatter and an all-gather of the parts."""
    steps = 2 * (topology.world_size - 1)
    return _ring(topology, steps, steps * num_bytes // topology.world_size)


def all_to_all(topology: Topology, num_bytes: int) -> Traffic:
    """`num_bytes` from each rank to each other one, at once."""
    sent = (topology.world_size - 1) * num_bytes
    far = (topology.world_size - min(topology.node_sizes)) * num_bytes
    return replace(_one_step(topology.num_nodes > 1, sent, far), collectives=1)


def to_ranks(num_near: int, num_far: int, num_bytes: int) -> Traffic:
    """The same message to ranks of this node and of others."""
    sent = (num_near + num_far) * num_bytes
    step = _one_step(num_far > 0, sent, num_far * num_bytes)
    return replace(step, messages=num_near + num_far)


def local(num_operations: int, num_bytes: int) -> Traffic:
    return Traffic(local_operations=num_operations, local_bytes=num_bytes)


def _ring(topology: Topology, steps: int, num_bytes: int) -> Traffic:
    if topology.num_nodes == 1:
        return Traffic(collectives=1, steps_inside=steps, bytes_inside=num_bytes)
    # The slowest of the pieces travels over every link but the fastest.
    laps, hops = divmod(steps, topology.world_size)
    between = laps * topology.num_crossings + min(hops, topology.num_crossings)
    return Traffic(
        collectives=1,
        steps_inside=steps - between,
        steps_between=between,
        bytes_between=num_bytes,
    )


def _one_step(is_far: bool, num_bytes: int, num_bytes_far: int) -> Traffic:
    return Traffic(
        steps_inside=int(not is_far and num_bytes > 0),
        steps_between=int(is_far),
        bytes_inside=num_bytes - num_bytes_far,
        bytes_between=num_bytes_far,
    )


def _all_gather(case: Case) -> Traffic:
    num_bytes = case.message.num_bytes
    return ring(case.topology, num_bytes) + local(1, case.topology.world_size * num_bytes)


def _two_phase(case: Case) -> Traffic:
    deal = Slices.of_heads if case.head_sharded else Slices.of_rows
    slices = deal(case.message, case.topology.world_size)
    step = all_to_all(case.topology, slices.message.num_bytes) + local(3, 2 * slices.num_bytes)
    if case.head_sharded:
        return step
    results = slices.to(case.out_dtype)
    return step + ring(case.topology, results.message.num_bytes) + local(2, results.num_bytes)


def _hierarchical(case: Case) -> Traffic:
    topology = case.topology
    size = topology.subtree_size
    num_subtrees = topology.world_size // size
    if size == 1:
        num_bytes = case.message.num_bytes
        far = topology.world_size - min(topology.node_sizes)
        step = to_ranks(topology.world_size - 1 - far, far, num_bytes)
        return step + local(1, topology.world_size * num_bytes)
    slices = Slices.of_rows(case.message, size)
    partial = replace(slices.message, dtype=torch.float32)
    results = slices.to(case.out_dtype)
    work = to_ranks(size - 1, 0, slices.message.num_bytes) + local(3, 2 * slices.num_bytes)
    if num_subtrees > 1:
        # Runs of ranks in the same node are as near as the ranks of a run.
        near = min(topology.node_sizes) // size - 1
        work += to_ranks(near, num_subtrees - 1 - near, partial.num_bytes)
        work += local(1, num_subtrees * partial.num_bytes)
    work += to_ranks(size - 1, 0, results.message.num_bytes)
    return work + local(2, results.num_bytes)


def _butterfly(case: Case) -> Traffic:
    world_size = case.topology.world_size
    # Ranks of a short last block serve several others; the first of them serves the most.
    ranks = {(world_size - 1) >> level << level for level in range(world_size.bit_length())}
    works = [_butterfly_of(rank, case) for rank in sorted(ranks)]
    return max(works, key=lambda work: work.bytes_sent)


def _butterfly_of(rank: int, case: Case) -> Traffic:
    topology = case.topology
    work = local(1, case.message.num_bytes)
    for step in levels(rank, topology.world_size):
        message = case.message if step.level == 0 else replace(case.message, dtype=torch.float32)
        readers = len(step.readers)
        is_far = topology.num_nodes > 1 and topology.subtree_size < 2 << step.level
        work += to_ranks(0 if is_far else readers, readers if is_far else 0, message.num_bytes)
        work += local(1, 2 * message.num_bytes)
    return work


def _sums(case: Case, *packed: int) -> Traffic:
    work = local(6, 4 * case.message.num_bytes)
    for num_bytes in packed:
        work += all_reduce(case.topology, num_bytes)
    return work


def _three_allreduce(case: Case) -> Traffic:
    rows = 4 * case.message.num_rows
    return _sums(case, rows, rows, case.message.o_bytes)


def _max_then_sum(case: Case) -> Traffic:
    return _sums(case, 4 * case.message.num_rows, case.message.num_bytes)


_OF_STRATEGY: dict[str, Callable[[Case], Traffic]] = {
    "all_gather": _all_gather,
    "two_phase": _two_phase,
    "hierarchical": _hierarchical,
    "butterfly": _butterfly,
    "three_allreduce": _three_allreduce,
    "max_then_sum": _max_then_sum,
}
