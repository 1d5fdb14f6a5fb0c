# SPDX-License-Identifier: BSD-3-Clause
"""One decoding step on a simulated cluster, by any strategy or ring."""

from __future__ import annotations

from dataclasses import dataclass

from tree_attention.exchange.strategies import strategies
from tree_attention.exchange.transport.topology import Topology

from ..papers.tree_allreduce import strategy_of
from .clusters import SimulatedCluster
from .collectives import all_gather, all_reduce, all_to_all, messages, to_everybody
from .fabric import Fabric, Floats, Ints
from .problem import Problem
from .recording import Program, program_of
from .rings import RINGS, SimulatedRanks


def methods() -> tuple[str, ...]:
    """Every strategy that needs nothing but a process group, and both rings."""
    return (*strategies(), *RINGS)


@dataclass(frozen=True)
class Run:
    """One simulated decoding step."""

    seconds: float  # from the start until the last rank has the result
    bytes_sent: Ints  # by rank
    messages_sent: Ints  # by rank
    network: str


def simulate(method: str, problem: Problem, cluster: SimulatedCluster, world_size: int) -> Run:
    """A step over the fastest of the networks that the cluster's library may take."""
    program = None
    if method not in RINGS:
        topology = cluster.topology(world_size)
        program = program_of(strategy_of(method), problem.layout, topology, problem.dtype)
    runs = []
    for network in cluster.networks:
        if network.tree and not (program and any(s.name == "all_reduce" for s in program.steps)):
            continue  # nothing in it would be another
        ranks = SimulatedRanks(problem, cluster, Fabric(network, world_size))
        if program is None:
            RINGS[method].run(ranks)
        else:
            ranks.attend()
            ranks.begin()
            replay(program, ranks)
        fabric = ranks.fabric
        seconds = float(fabric.now.max())
        runs.append(Run(seconds, fabric.bytes_sent, fabric.messages_sent, network.name))
    return min(runs, key=lambda run: run.seconds)


def replay(program: Program, ranks: SimulatedRanks) -> None:
    """Move what a recording link saw over the links of a fabric."""
    fabric, awaited = ranks.fabric, dict[int, Floats]()
    collectives = {"all_gather": all_gather, "all_to_all": all_to_all, "all_reduce": all_reduce}
    for step in program.steps:
        ranks.local(step.kernels, step.local_bytes)
        since = awaited.get(step.round_idx)
        if step.name == "post":
            awaited[step.round_idx] = fabric.now.copy()
        elif step.name == "messages":
            messages(fabric, step.batches, since)
        elif step.name == "gather" and fabric.network.gathers_directly:
            messages(fabric, to_everybody(fabric, step.num_bytes), since)
        elif step.name == "gather":
            all_gather(fabric, step.num_bytes)
        elif step.name != "return":
            collectives[step.name](fabric, step.num_bytes)


def bytes_of_formula(method: str, problem: Problem, topology: Topology) -> int:
    """Bytes that the busiest rank sends, as the strategy itself or the ring's formula says."""
    if method in RINGS:
        return RINGS[method].bytes_sent(problem, topology.world_size)
    strategy = strategy_of(method)
    return strategy.traffic(problem.layout, topology, problem.dtype, False).bytes_sent


def step_bytes(method: str, problem: Problem, topology: Topology) -> int:
    """Bytes that the rank with the most memory needs beside its shard and the query: buffers that
    the communicator keeps, and the outputs."""
    layout = problem.layout
    outputs = layout.num_rows * (problem.head_dim * problem.dtype.itemsize + 4)
    if method in RINGS:
        return RINGS[method].memory(problem, topology.world_size) + layout.message_bytes + outputs
    program = program_of(strategy_of(method), layout, topology, problem.dtype)
    return int(program.buffer_bytes.max()) + outputs
