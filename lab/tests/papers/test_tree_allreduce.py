# SPDX-License-Identifier: BSD-3-Clause
"""Algorithm 3 by recursive doubling: its result, its steps and its bytes, for any tree."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from distributed import run_ranks
from lab.papers.tree_allreduce import (
    NAME,
    FanIns,
    levels_of,
    registered,
    strategy_of,
    tree,
)
from lab.simulation import CLUSTERS, Problem, bytes_of_formula, simulate
from tree_attention import merge_states, strategies
from tree_attention.exchange import Communicator, Topology

NAMES = (NAME, f"{NAME}_3", f"{NAME}_2_3")


@given(st.integers(2, 300), st.lists(st.integers(2, 9), min_size=1, max_size=3).map(tuple))
def test_every_rank_gets_every_part_once_in_order(world_size: int, fan_ins: FanIns) -> None:
    """Played without a network: runs of ranks in place of parts."""
    levels = [levels_of(rank, world_size, fan_ins) for rank in range(world_size)]
    held = [(rank, rank + 1) for rank in range(world_size)]
    for number in range(len(levels[0])):
        after = []
        for rank in range(world_size):
            level = levels[rank][number]
            assert rank not in level.readers and len(set(level.readers)) == len(level.readers)
            for block, source in level.sources.items():
                there = levels[source][number]
                assert rank in there.readers and there.own == block
            parts = {level.own: held[rank]} | {b: held[r] for b, r in level.sources.items()}
            runs = [parts[block] for block in range(level.num_blocks)]
            assert all(a[1] == b[0] for a, b in pairwise(runs))
            after.append((runs[0][0], runs[-1][1]))
        held = after
    assert held == [(0, world_size)] * world_size
    if len(fan_ins) == 1:
        assert len(levels[0]) == math.ceil(round(math.log(world_size, fan_ins[0]), 9))


def states_of(world_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(world_size)
    o = torch.randn(world_size, 2, 4, 3, 5, generator=generator)
    lse = 50 * torch.randn(world_size, 2, 4, 3, generator=generator)
    empty = torch.rand(lse.shape, generator=generator) < 0.3
    empty[:, 0, 0] = True  # on all ranks
    o[empty], lse[empty] = torch.nan, -torch.inf
    return o, lse


def exchange(rank: int, world_size: int, nodes: str) -> list[tuple[int, int, bytes]]:
    comm, (o, lse) = Communicator(nodes=nodes), states_of(world_size)
    expected = merge_states(o, lse)
    found = []
    with registered(*NAMES):
        for name in NAMES:
            for _ in range(2):  # the first call compares, and repeats the one before
                before = comm.bytes_sent, comm.link.num_operations
                result = comm.all_merge_states(o[rank], lse[rank], strategy=name)
            assert_close(result, expected, rtol=1e-5, atol=1e-6)
            sent, rounds = comm.bytes_sent - before[0], comm.link.num_operations - before[1]
            found.append((sent, rounds, torch.cat([x.flatten() for x in result]).numpy().tobytes()))
        comm.all_merge_states(o[rank], lse[rank], strategy="all_gather")
    assert not set(NAMES) & set(strategies())
    return found


@pytest.mark.parametrize("nodes", ["ab", "aabb", "aaabc", "abcdefg"])
@pytest.mark.parametrize("direct", [False, True])
def test_result_steps_and_bytes(nodes: str, direct: bool) -> None:
    world_size = len(nodes)
    ranks = run_ranks(exchange, world_size, nodes, direct=direct, fresh=True)
    layout = Communicator().state(torch.Size((2, 4, 3, 5)), torch.device("cpu")).layout
    for number, name in enumerate(NAMES):
        sent, rounds, bits = zip(*(found[number] for found in ranks), strict=True)
        assert len(set(bits)) == 1, name
        traffic = strategy_of(name).traffic(layout, Topology.of(nodes), torch.float32, False)
        assert set(rounds) == {traffic.steps} and max(sent) == traffic.bytes_sent
    assert ranks[0][0][1] == 3 * math.ceil(math.log2(world_size))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("world_size", [2, 7, 8, 24])
def test_simulated_bytes_are_the_formulas(name: str, world_size: int) -> None:
    cluster, problem = CLUSTERS["metro"], Problem(100)
    run = simulate(name, problem, cluster, world_size)
    topology = cluster.topology(world_size)
    assert run.bytes_sent.max() == bytes_of_formula(name, problem, topology)
    # Most steps wait for a trip over the link, and a ring's steps are many more.
    steps = strategy_of(name).traffic(problem.layout, topology, problem.dtype, False).steps
    assert 0.6e-3 * steps < run.seconds < 3 * steps * 1e-3
    if world_size > 4:
        assert simulate("three_allreduce", problem, cluster, world_size).seconds > 2 * run.seconds


def test_names_of_trees() -> None:
    assert strategy_of(NAME) is tree(2) and strategy_of(f"{NAME}_8_2") is tree(8, 2)
    for name in ("tree_allreduces", "tree", f"{NAME}8"):
        with pytest.raises(KeyError):
            strategy_of(name)
