# SPDX-License-Identifier: BSD-3-Clause
"""Peak memory of a decoding step on the rank that needs most: what this library allocates.

Buffers that a communicator keeps and the outputs, for tensors that need no copy in host memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from tree_attention.exchange.slices import Slices
from tree_attention.exchange.topology import Topology
from tree_attention.ring_pass_q import _ALIGNMENT

from .programs import RING, RING_PASS_Q, Parts, Problem


@dataclass(frozen=True)
class _Case:
    problem: Problem
    topology: Topology

    @property
    def ranks(self) -> int:
        return self.topology.world_size

    @property
    def state(self) -> int:
        """A rank's own."""
        return self.problem.message.num_bytes


def step_bytes(way: str, problem: Problem, topology: Topology) -> int:
    """Beside the shard and the query."""
    message = problem.message
    outputs = message.num_rows * (problem.head_dim * problem.dtype.itemsize + 4)
    return message.num_bytes + _OF_WAY[way](_Case(problem, topology)) + outputs


def peak_bytes(way: str, problem: Problem, topology: Topology) -> int:
    """With the shard."""
    return problem.kv_bytes + step_bytes(way, problem, topology)


def _all_gather(case: _Case) -> int:
    return case.ranks * case.state


def _two_phase(case: _Case) -> int:
    slices = Slices.of_rows(case.problem.message, case.ranks)
    results = slices.to(case.problem.dtype)
    return 2 * slices.num_bytes + results.message.num_bytes + results.num_bytes


def _hierarchical(case: _Case) -> int:
    size = case.topology.subtree_size
    if size == 1:
        return _all_gather(case)
    slices = Slices.of_rows(case.problem.message, size)
    subtrees = case.ranks // size
    partial = replace(slices.message, dtype=torch.float32).num_bytes
    from_others = subtrees * partial if subtrees > 1 else 0
    return 2 * slices.num_bytes + from_others + slices.to(case.problem.dtype).num_bytes


def _butterfly(case: _Case) -> int:
    return 2 * (case.ranks - 1).bit_length() * case.state  # a pair per level


def _sums(case: _Case) -> int:
    return case.state + 5 * case.problem.message.num_rows  # maxima, and whether a row is empty


def _ring(case: _Case) -> int:
    """Shards that arrive and leave, and a state for each."""
    return min(2, case.ranks - 1) * case.problem.kv_bytes + case.ranks * case.state


def _ring_pass_q(case: _Case) -> int:
    parts = Parts.of(case.problem, case.ranks)
    queries, state, result = int(parts.queries.max()), int(parts.states.max()), parts.result
    # A state leaves, one arrives, one is merged from a pair.
    pair = 2 * (-(-state // _ALIGNMENT) * _ALIGNMENT)
    return 2 * queries + 3 * state + pair + (1 + case.ranks) * result


_OF_WAY: dict[str, Callable[[_Case], int]] = {
    "all_gather": _all_gather,
    "two_phase": _two_phase,
    "hierarchical": _hierarchical,
    "butterfly": _butterfly,
    "three_allreduce": _sums,
    "max_then_sum": _sums,
    RING: _ring,
    RING_PASS_Q: _ring_pass_q,
}
