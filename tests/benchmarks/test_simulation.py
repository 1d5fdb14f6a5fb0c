# SPDX-License-Identifier: BSD-3-Clause
"""Simulated decoding steps: bytes and memory of the library, and no surprises."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.simulation import (
    CLUSTERS,
    RING,
    RING_PASS_Q,
    Level,
    Network,
    Problem,
    from_costs,
    memory,
    simulate,
    ways,
)
from benchmarks.simulation.fabric import EVERYBODY
from benchmarks.simulation.programs import NODES_IN_PAIRS, bytes_of_formula
from distributed import run_ranks
from simulated import cluster_of, one_level
from tree_attention import ring_decode, ring_pass_q_decode, strategies, tree_decode
from tree_attention.exchange import Communicator
from tree_attention.exchange.costs import Costs
from tree_attention.exchange.traffic import Case, traffic


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
@pytest.mark.parametrize("world_size", [2, 4, 16])
@pytest.mark.parametrize("strategy", strategies())
def test_agrees_with_the_cost_model_where_nobody_waits(
    strategy: str, world_size: int, backend: str
) -> None:
    """One node, symmetric: the sum of costs that `auto` compares."""
    # Over Gloo, local work before a round of messages hides behind the questions for them.
    local = (1e-6, 1e-10) if backend == "nccl" else (0.0, 0.0)
    costs = Costs(1e-3, 1e-4, 0.0, 1e-5, 1e-9, 0.0, 0.0, *local)
    cluster = from_costs("test", costs, world_size, key_bandwidth=1e9, backend=backend)
    problem = Problem(1000, batch=2)
    run = simulate(strategy, problem, cluster, world_size)
    topology = cluster.topology(world_size)
    work = traffic(strategy, Case(topology, problem.message, problem.dtype, backend=backend))
    attention = costs.local_operations + problem.kv_bytes / 1e9
    assert run.seconds == pytest.approx(attention + costs.seconds(work), rel=1e-9)


def test_ring_is_a_hop_per_rank() -> None:
    costs = Costs(1e-3, 1e-4, 0.0, 1e-5, 1e-9, 0.0, 0.0, 0.0, 0.0)
    cluster = from_costs("test", costs, 8, key_bandwidth=1e12)
    problem = Problem(1000)
    run = simulate(RING, problem, cluster, 8)
    manifests = 1e-4 + 7 * (2e-5 + 80e-9)  # a question and an answer each
    hops = 7 * (2e-5 + problem.kv_bytes * 1e-9) + problem.kv_bytes / 1e12
    assert run.seconds == pytest.approx(1e-3 + manifests + hops)
    # Attention hides behind the transfer, or the transfer behind attention.
    slow = replace(cluster, key_bandwidth=1e8)
    hops = 8 * problem.kv_bytes / 1e8
    assert simulate(RING, problem, slow, 8).seconds == pytest.approx(1e-3 + manifests + hops)


def test_overlapped_exchanges_hide_behind_attention() -> None:
    """Four parts of a batch: the first computes alone, the last is exchanged alone."""
    network = one_level(gathers_directly=True)
    problem = Problem(1000, batch=64)
    exchange = 1.0 + problem.message.num_bytes / 4 / 10.0
    for attention in (0.1 * exchange, 10 * exchange):  # of a part
        bandwidth = problem.kv_bytes / (4 * attention)
        cluster = replace(cluster_of(network), key_bandwidth=bandwidth)
        seconds = simulate("butterfly", problem, cluster, 2, overlapped=True).seconds
        assert seconds == pytest.approx(attention + 3 * max(attention, exchange) + exchange)
        whole = simulate("butterfly", problem, cluster, 2)
        assert whole.seconds == pytest.approx(4 * attention + 4 * exchange - 3.0)
        assert whole.bytes_sent.tolist() == [problem.message.num_bytes] * 2


def test_tree_wins_by_what_the_ring_moves() -> None:
    seconds = [
        [simulate(way, Problem(n), CLUSTERS["metro"], 8).seconds for way in ("all_gather", RING)]
        for n in (8_192, 65_536, 1_048_576)
    ]
    ratios = [ring / tree for tree, ring in seconds]
    assert ratios == sorted(ratios) and ratios[1] >= 8


def measured_by_rank(
    rank: int, world_size: int, ranks_per_node: int, batch: int, keys: int
) -> dict[str, tuple[int, int]]:
    """Bytes that each way sends, and those that it keeps and returns."""
    q = torch.ones(batch, 8, 1, 16, dtype=torch.bfloat16)
    k, v = torch.ones(2, batch, 2, keys, 16, dtype=torch.bfloat16)
    result = {}
    for way in ways():
        comm = Communicator(nodes=[r // ranks_per_node for r in range(world_size)])

        def call(way: str = way, comm: Communicator = comm) -> tuple[torch.Tensor, torch.Tensor]:
            if way == RING:
                return ring_decode(q, k, v, group=comm)
            if way == RING_PASS_Q:
                return ring_pass_q_decode(q, k, v, group=comm)
            return tree_decode(q, k, v, group=comm, strategy=way, overlap=False)

        outputs = call()
        before = comm.bytes_sent
        call()
        kept = [*comm._buffers.arena._blocks.values(), *comm._scratch.values(), *outputs]
        result[way] = comm.bytes_sent - before, sum(tensor.nbytes for tensor in kept)
    return result


@pytest.mark.parametrize(
    ("world_size", "ranks_per_node", "batch"), [(3, 3, 1), (4, 2, 5), (5, 2, 2)]
)
def test_bytes_are_those_that_every_rank_sends_and_keeps(
    world_size: int, ranks_per_node: int, batch: int
) -> None:
    measured = run_ranks(measured_by_rank, world_size, ranks_per_node, batch, 12)
    problem = Problem(12, batch, (8, 2), head_dim=16)
    levels = (Level(EVERYBODY, 1e-3, 1e9),)
    network = Network("test", levels, chunks=2, gathers_directly=True)
    cluster = cluster_of(network, ranks_per_node)
    topology = cluster.topology(world_size)
    for way in ways():
        run = simulate(way, problem, cluster, world_size)
        assert run.bytes_sent.tolist() == [of_rank[way][0] for of_rank in measured], way
        kept = max(of_rank[way][1] for of_rank in measured)
        assert memory.step_bytes(way, problem, topology) == kept, way


@st.composite
def worlds(draw: st.DrawFn) -> tuple[Problem, Network, int, int]:
    ranks_per_node = draw(st.sampled_from([1, 2, 3, 4, 8]))
    levels = [Level(EVERYBODY, draw(st.floats(0, 1e-2)), draw(st.floats(1e6, 1e9)), 1e-6)]
    if ranks_per_node > 1:
        inside = Level(ranks_per_node, draw(st.floats(0, 1e-3)), draw(st.floats(1e8, 1e11)))
        levels.insert(0, inside)
    network = Network(
        "test",
        tuple(levels),
        asks_first=draw(st.booleans()),
        chunks=draw(st.integers(1, 3)),
        gathers_directly=draw(st.booleans()),
    )
    heads_kv = draw(st.sampled_from([1, 2, 5]))
    group = draw(st.sampled_from([1, 4]))
    problem = Problem(
        draw(st.integers(1, 50)), draw(st.integers(1, 9)), (group * heads_kv, heads_kv), 16
    )
    return problem, network, ranks_per_node, draw(st.integers(2, 18))


@settings(max_examples=60, deadline=None)
@given(worlds(), st.sampled_from(ways()))
def test_bytes_equal_the_formulas(world: tuple[Problem, Network, int, int], way: str) -> None:
    problem, network, ranks_per_node, world_size = world
    cluster = cluster_of(network, ranks_per_node)
    run = simulate(way, problem, cluster, world_size)
    formula = bytes_of_formula(way, problem, cluster.topology(world_size))
    assert run.bytes_sent.max() == formula
    assert (run.messages_sent > 0).all()


@settings(max_examples=60, deadline=None)
@given(worlds(), st.sampled_from(ways()), st.data())
def test_worse_is_never_faster(
    world: tuple[Problem, Network, int, int], way: str, data: st.DataObject
) -> None:
    problem, network, ranks_per_node, world_size = world
    *inner, top = network.levels
    worse = data.draw(
        st.sampled_from(
            [
                replace(top, latency=2 * top.latency + 1e-4),
                replace(top, bandwidth=top.bandwidth / 2),
                replace(top, overhead=2e-5),
                replace(top, ranks_per_port=ranks_per_node),
            ]
        )
    )

    def seconds(network: Network, problem: Problem = problem) -> float:
        return simulate(way, problem, cluster_of(network, ranks_per_node), world_size).seconds

    before = seconds(network)
    assert seconds(replace(network, levels=(*inner, worse))) >= before * (1 - 1e-12)
    assert seconds(replace(network, asks_first=True)) >= before * (1 - 1e-12)
    more = replace(problem, batch=problem.batch + world_size)
    assert seconds(network, more) >= before * (1 - 1e-12)


def test_time_is_from_the_last_ranks_start() -> None:
    cluster = cluster_of(Network("test", (Level(EVERYBODY, 0.0, 1e9, overhead=1.0),)))
    alone, shared = (
        simulate("butterfly", Problem(1), replace(cluster, processors=n), 4).seconds for n in (4, 2)
    )
    # Two steps of a message each; or four messages of two ranks, whose second one begins after one.
    assert alone == pytest.approx(2.0, rel=1e-3)
    assert shared == pytest.approx(4.0 - 1.0, rel=1e-3)


@pytest.mark.parametrize("way", ["hierarchical", "butterfly", RING])
def test_thousands_of_ranks(way: str) -> None:
    cluster = CLUSTERS["three-level"]
    problem = Problem(1250, heads=(16, 16))
    run = simulate(way, problem, cluster, 4096)
    assert run.bytes_sent.max() == bytes_of_formula(way, problem, cluster.topology(4096))
    hops = {RING: 4095 * problem.kv_bytes / 0.125e9, "butterfly": 7 * 1e-3, "hierarchical": 1e-3}
    assert run.seconds > hops[way]


def test_nodes_in_pairs_is_hierarchical_with_fewer_messages_between_nodes() -> None:
    network = Network("test", (Level(2, 1.0, 1e12), Level(EVERYBODY, 10.0, 1e12)))
    problem = Problem(0, heads=(2, 2))
    runs = [
        simulate(way, problem, cluster_of(network, 2), 16)
        for way in ("hierarchical", NODES_IN_PAIRS)
    ]
    # In and out of the node; seven slices at once between them, or three one after the other.
    assert [run.messages_sent.tolist() for run in runs] == [[1 + 7 + 1] * 16, [1 + 3 + 1] * 16]
    assert [run.seconds for run in runs] == pytest.approx([1 + 10 + 1, 1 + 30 + 1])


@pytest.mark.parametrize("gathers_directly", [False, True])
def test_gathers(gathers_directly: bool) -> None:
    """NCCL by its ring, the library over Gloo by a message to everybody."""
    cluster = cluster_of(one_level(gathers_directly=gathers_directly))
    problem = Problem(0, heads=(1, 1))
    run = simulate("all_gather", problem, cluster, 5)
    service = problem.message.num_bytes / 10
    hops = 1 if gathers_directly else 4
    assert run.seconds == pytest.approx(hops + 4 * service)
