# SPDX-License-Identifier: BSD-3-Clause
"""What each strategy does for a state: steps, bytes and local work, from sizes alone.

A step is a trip over a link that waits for the one before it. Gloo's data wait until the receiver
has asked for them, which is a trip of its own unless it asked earlier. Libraries run all-gathers
and all-reduces as rings, all-to-alls directly; messages between some ranks are those of
`messages`, one all-to-all over NCCL.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    messages: int = 0  # but not those of NCCL's rings
    steps_inside: int = 0  # a node: trips that wait for each other
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
    backend: str = "gloo"  # of the process group, for tensors like these; all but NCCL as Gloo


def traffic(strategy: str, case: Case) -> Traffic:
    return Traffic(exchanges=1) + _OF_STRATEGY[strategy](case)


def ring(topology: Topology, num_bytes: int, backend: str = "gloo") -> Traffic:
    """The library's all-gather of `num_bytes` from each rank: all of it goes through every link."""
    steps = topology.world_size - 1
    return _ring(topology, steps, steps * num_bytes, backend)


def all_reduce(topology: Topology, num_bytes: int, backend: str = "gloo") -> Traffic:
    """A reduce-scatter and an all-gather of the parts."""
    steps = 2 * (topology.world_size - 1)
    return _ring(topology, steps, steps * num_bytes // topology.world_size, backend)


def all_to_all(topology: Topology, num_bytes: int, backend: str = "gloo") -> Traffic:
    """`num_bytes` from each rank to each other one, at once."""
    return replace(to_ranks(*_others(topology), num_bytes, backend), collectives=1)


def all_gather(topology: Topology, num_bytes: int, backend: str = "gloo") -> Traffic:
    """`gather_round`: the same message to all ranks, or NCCL's own all-gather."""
    if backend == _NCCL:
        return ring(topology, num_bytes, backend)
    return to_ranks(*_others(topology), num_bytes, backend)


def to_ranks(num_near: int, num_far: int, num_bytes: int, backend: str = "gloo") -> Traffic:
    """A round of messages of `num_bytes` to ranks of this node and of others."""
    trips = (num_near + num_far > 0 and num_bytes > 0) * _trips(backend)
    return Traffic(
        collectives=int(backend == _NCCL),
        messages=num_near + num_far,
        steps_inside=trips * (num_far == 0),
        steps_between=trips * (num_far > 0),
        bytes_inside=num_near * num_bytes,
        bytes_between=num_far * num_bytes,
    )


def asked_at_once(rounds: Sequence[Traffic], backend: str = "gloo") -> Traffic:
    """One round after the other, whose receivers ask for all before the first one.

    The answers to the slowest question are there when they are needed, or it takes longest.
    """
    work = sum(rounds, Traffic())
    question = _trips(backend) - 1
    near = sum(question for part in rounds if part.steps_inside)
    far = sum(question for part in rounds if part.steps_between)
    return replace(
        work,
        steps_inside=work.steps_inside - near + question * (near > 0 and far == 0),
        steps_between=work.steps_between - far + question * (far > 0),
    )


def local(num_operations: int, num_bytes: int) -> Traffic:
    return Traffic(local_operations=num_operations, local_bytes=num_bytes)


_NCCL = "nccl"


def _trips(backend: str) -> int:
    """Of a message for which nobody has asked before."""
    return 1 if backend == _NCCL else 2


def _others(topology: Topology) -> tuple[int, int]:
    """Ranks near and far, of the rank that has most far ones."""
    far = topology.world_size - min(topology.node_sizes)
    return topology.world_size - 1 - far, far


def _ring(topology: Topology, steps: int, num_bytes: int, backend: str) -> Traffic:
    if topology.num_nodes == 1:
        between = 0
    elif backend == _NCCL:
        # The slowest of the pieces travels over every link but the fastest.
        laps, hops = divmod(steps, topology.world_size)
        between = laps * topology.num_crossings + min(hops, topology.num_crossings)
    else:
        # A rank behind the slowest link asks over it in every step, and all wait for that rank.
        between = steps
    trips = _trips(backend)
    return Traffic(
        collectives=1,
        messages=0 if backend == _NCCL else steps,
        steps_inside=trips * (steps - between),
        steps_between=trips * between,
        bytes_inside=num_bytes if topology.num_nodes == 1 else 0,
        bytes_between=num_bytes if topology.num_nodes > 1 else 0,
    )


def _all_gather(case: Case) -> Traffic:
    num_bytes = case.message.num_bytes
    work = all_gather(case.topology, num_bytes, case.backend)
    return work + local(1, case.topology.world_size * num_bytes)


def _two_phase(case: Case) -> Traffic:
    topology, backend = case.topology, case.backend
    deal = Slices.of_heads if case.head_sharded else Slices.of_rows
    slices = deal(case.message, topology.world_size)
    first = all_to_all(topology, slices.message.num_bytes, backend)
    if case.head_sharded:
        return first + local(3, 2 * slices.num_bytes)
    results = slices.to(case.out_dtype)
    second = all_gather(topology, results.message.num_bytes, backend)
    work = asked_at_once([first, second], backend)
    return work + local(5, 2 * slices.num_bytes + results.num_bytes)


def _hierarchical(case: Case) -> Traffic:
    topology, backend = case.topology, case.backend
    size = topology.subtree_size
    num_subtrees = topology.world_size // size
    if size == 1:
        return _all_gather(case)
    slices = Slices.of_rows(case.message, size)
    partial = replace(slices.message, dtype=torch.float32)
    results = slices.to(case.out_dtype)
    rounds = [to_ranks(size - 1, 0, slices.message.num_bytes, backend)]
    merges = local(3, 2 * slices.num_bytes)
    if num_subtrees > 1:
        # Runs of ranks in the same node are as near as the ranks of a run.
        near = min(topology.node_sizes) // size - 1
        far = num_subtrees - 1 - near
        rounds.append(to_ranks(near, far, partial.num_bytes, backend))
        merges += local(1, num_subtrees * partial.num_bytes)
    rounds.append(to_ranks(size - 1, 0, results.message.num_bytes, backend))
    return asked_at_once(rounds, backend) + merges + local(2, results.num_bytes)


def _butterfly(case: Case) -> Traffic:
    world_size = case.topology.world_size
    # Rank 0 has a neighbour on every level, so its steps are the longest chain. Ranks of a short
    # last block serve several others; the first of them serves the most.
    chain = _butterfly_of(0, case)
    ranks = {(world_size - 1) >> level << level for level in range(world_size.bit_length())}
    works = [_butterfly_of(rank, case) for rank in sorted(ranks)]
    busiest = max(works, key=lambda work: work.bytes_sent)
    sent = ("messages", "bytes_inside", "bytes_between")
    return replace(chain, **{name: getattr(busiest, name) for name in sent})


def _butterfly_of(rank: int, case: Case) -> Traffic:
    topology = case.topology
    rounds = []
    merges = local(1, case.message.num_bytes)
    for step in levels(rank, topology.world_size):
        message = case.message if step.level == 0 else replace(case.message, dtype=torch.float32)
        readers = len(step.readers)
        is_far = topology.num_nodes > 1 and topology.subtree_size < 2 << step.level
        near, far = (0, readers) if is_far else (readers, 0)
        rounds.append(to_ranks(near, far, message.num_bytes, case.backend))
        merges += local(1, 2 * message.num_bytes)
    return asked_at_once(rounds, case.backend) + merges


def _sums(case: Case, *packed: int) -> Traffic:
    work = local(6, 4 * case.message.num_bytes)
    for num_bytes in packed:
        work += all_reduce(case.topology, num_bytes, case.backend)
    return work


def _three_allreduce(case: Case) -> Traffic:
    rows = 4 * case.message.num_rows
    return _sums(case, rows, rows, case.message.o_bytes)


def _max_then_sum(case: Case) -> Traffic:
    return _sums(case, 4 * case.message.num_rows, case.message.num_bytes)


def _one_shot(case: Case) -> Traffic:
    """Stores into the other ranks' memory and one kernel, by no library."""
    world_size, num_bytes = case.topology.world_size, case.message.num_bytes
    sent = Traffic(steps_inside=1, bytes_inside=(world_size - 1) * num_bytes)
    return sent + local(1, world_size * num_bytes)


_OF_STRATEGY: dict[str, Callable[[Case], Traffic]] = {
    "all_gather": _all_gather,
    "two_phase": _two_phase,
    "hierarchical": _hierarchical,
    "butterfly": _butterfly,
    "three_allreduce": _three_allreduce,
    "max_then_sum": _max_then_sum,
    "one_shot": _one_shot,
}
