# SPDX-License-Identifier: BSD-3-Clause
"""Simulated decoding steps: bytes and memory of the library, and no surprises."""

from __future__ import annotations

import importlib
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distributed import run_ranks
from lab.simulation import (
    CLUSTERS,
    RING,
    RING_PASS_Q,
    Level,
    Problem,
    SimulatedNetwork,
    bytes_of_formula,
    methods,
    simulate,
    step_bytes,
)
from lab.simulation.fabric import EVERYBODY
from lab.simulation.recording import program_of
from simulated import cluster_of, one_level
from tree_attention import ring_decode, ring_pass_q_decode, tree_decode
from tree_attention.baselines import MANIFEST_BYTES
from tree_attention.exchange import Communicator, Link, Topology

# By name, as `tree_attention.exchange.strategies` is also a function of the package above it.
strategies_package = importlib.import_module("tree_attention.exchange.strategies")


def test_ring_is_a_hop_per_rank() -> None:
    cluster = replace(
        cluster_of(SimulatedNetwork("test", (Level(EVERYBODY, 2e-5, 1e9),), call=1e-4)),
        exchange=1e-3,
        key_bandwidth=1e12,
    )
    problem = Problem(1000)
    run = simulate(RING, problem, cluster, 8)
    manifests = 1e-4 + 7 * (2e-5 + MANIFEST_BYTES * 1e-9)
    hops = 7 * (2e-5 + problem.kv_bytes * 1e-9) + problem.kv_bytes / 1e12
    assert run.seconds == pytest.approx(1e-3 + manifests + hops)
    # Attention hides behind the transfer, or the transfer behind attention.
    slow = replace(cluster, key_bandwidth=1e8)
    hops = 8 * problem.kv_bytes / 1e8
    assert simulate(RING, problem, slow, 8).seconds == pytest.approx(1e-3 + manifests + hops)


def test_butterfly_is_a_step_per_level() -> None:
    """By hand: the recorded program has the local work of every rank and its messages."""
    network = one_level(gathers_directly=True)
    cluster = replace(cluster_of(network), local_operation=0.5, exchange=3.0)
    problem = Problem(0)
    message = 1.0 + problem.layout.num_bytes / 10
    # Attention, the leaf, and a merge after each of two messages.
    expected = 0.5 + 3.0 + 0.5 + 2 * (message + 0.5)
    assert simulate("butterfly", problem, cluster, 4).seconds == pytest.approx(expected)


TOY = """
import torch.distributed as dist
from tree_attention.exchange.strategies import Strategy, Traffic

def prepare(context):
    scratch = context.state.buffer("toy", 4 * context.link.world_size)

    def exchange(deadline, o, lse):
        scratch.zero_()
        context.link.all_to_all(scratch.view(-1, 4), scratch.view(-1, 4), deadline)
        o.zero_()

    return exchange

def traffic(layout, topology, out_dtype, head_sharded):
    return Traffic(1, 4 * (topology.world_size - 1))

STRATEGY = Strategy(prepare, traffic, is_canonical=False)
"""


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "toy_of_this_test.py").write_text(TOY)
    monkeypatch.setattr(
        strategies_package, "__path__", [*strategies_package.__path__, str(tmp_path)]
    )
    strategies_package.discover()
    yield "toy_of_this_test"
    del strategies_package.STRATEGIES["toy_of_this_test"]


def test_a_strategy_is_known_by_its_file(toy: str) -> None:
    assert toy in methods()
    cluster = replace(cluster_of(one_level()), local_operation=0.5)
    problem, topology = Problem(0), cluster.topology(5)
    run = simulate(toy, problem, cluster, 5)
    # Attention, two kernels, and four messages of four bytes to each rank, in turn.
    assert run.seconds == pytest.approx(3 * 0.5 + 1.0 + 4 * 0.4)
    assert run.bytes_sent.tolist() == [16] * 5
    assert bytes_of_formula(toy, problem, topology) == 16
    outputs = 32 * (128 * 2 + 4)
    assert step_bytes(toy, problem, topology) == problem.layout.message_bytes + 20 + outputs


def test_ranks_that_do_not_do_the_same_are_refused(toy: str) -> None:
    strategy = strategies_package.STRATEGIES[toy]

    def prepare(context):
        exchange = strategy.prepare(context)
        if context.link.rank == 1:
            return lambda deadline, o, lse: context.link.all_reduce(lse, None, deadline)
        return exchange

    with pytest.raises(ValueError, match="operation 0 is not the same on all ranks"):
        program_of(
            replace(strategy, prepare=prepare), Problem(0).layout, Topology((0, 1)), torch.float32
        )


def test_tree_wins_by_what_the_ring_moves() -> None:
    seconds = [
        [
            simulate(method, Problem(n), CLUSTERS["metro"], 8).seconds
            for method in ("all_gather", RING)
        ]
        for n in (8_192, 65_536, 1_048_576)
    ]
    ratios = [ring / tree for tree, ring in seconds]
    assert ratios == sorted(ratios) and ratios[1] >= 8


def measured_by_rank(
    rank: int, world_size: int, ranks_per_node: int, batch: int, keys: int
) -> dict[str, tuple[int, int]]:
    """Bytes that each method sends, and those that it holds and returns."""
    q = torch.ones(batch, 8, 1, 16, dtype=torch.bfloat16)
    k, v = torch.ones(2, batch, 2, keys, 16, dtype=torch.bfloat16)
    result = {}
    start_shift, received, shards = Link.start_shift, [], [0]

    def count_received(link: Link, receive: list[torch.Tensor | None], send: Any) -> Any:
        """Counts the bytes of the shards received in a call that are still alive, at most."""
        received.extend(weakref.ref(x) for x in receive if x is not None)
        alive = [x for reference in received if (x := reference()) is not None]
        shards.append(sum(tensor.nbytes for tensor in alive))
        return start_shift(link, receive, send)

    for method in methods():
        comm = Communicator(nodes=[r // ranks_per_node for r in range(world_size)])

        def call(
            method: str = method, comm: Communicator = comm
        ) -> tuple[torch.Tensor, torch.Tensor]:
            if method == RING:
                return ring_decode(q, k, v, group=comm)
            if method == RING_PASS_Q:
                return ring_pass_q_decode(q, k, v, group=comm)
            return tree_decode(q, k, v, group=comm, strategy=method)

        outputs = call()
        before = comm.bytes_sent
        received.clear()
        shards[:] = [0]
        with mock.patch.object(Link, "start_shift", count_received):
            call()
        held = [*comm._buffers.prepared.arena._blocks.values(), *outputs]
        result[method] = (
            comm.bytes_sent - before,
            sum(tensor.nbytes for tensor in held) + max(shards),
        )
    return result


@pytest.mark.parametrize(
    ("world_size", "ranks_per_node", "batch"), [(3, 3, 1), (4, 2, 5), (5, 2, 2)]
)
def test_bytes_are_those_that_every_rank_sends_and_holds(
    world_size: int, ranks_per_node: int, batch: int
) -> None:
    measured = run_ranks(measured_by_rank, world_size, ranks_per_node, batch, 12)
    problem = Problem(12, batch, (8, 2), head_dim=16)
    levels = (Level(EVERYBODY, 1e-3, 1e9),)
    network = SimulatedNetwork("test", levels, chunks=2, gathers_directly=True)
    cluster = cluster_of(network, ranks_per_node)
    topology = cluster.topology(world_size)
    for method in methods():
        run = simulate(method, problem, cluster, world_size)
        assert run.bytes_sent.tolist() == [of_rank[method][0] for of_rank in measured], method
        held = max(of_rank[method][1] for of_rank in measured)
        assert step_bytes(method, problem, topology) == held, method


@st.composite
def worlds(draw: st.DrawFn) -> tuple[Problem, SimulatedNetwork, int, int]:
    ranks_per_node = draw(st.sampled_from([1, 2, 3, 4, 8]))
    levels = [Level(EVERYBODY, draw(st.floats(0, 1e-2)), draw(st.floats(1e6, 1e9)), 1e-6)]
    if ranks_per_node > 1:
        inside = Level(ranks_per_node, draw(st.floats(0, 1e-3)), draw(st.floats(1e8, 1e11)))
        levels.insert(0, inside)
    network = SimulatedNetwork(
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
@given(worlds(), st.sampled_from(methods()))
def test_bytes_equal_the_formulas(
    world: tuple[Problem, SimulatedNetwork, int, int], method: str
) -> None:
    problem, network, ranks_per_node, world_size = world
    cluster = cluster_of(network, ranks_per_node)
    run = simulate(method, problem, cluster, world_size)
    formula = bytes_of_formula(method, problem, cluster.topology(world_size))
    assert run.bytes_sent.max() == formula
    assert (run.messages_sent > 0).all()


@settings(max_examples=60, deadline=None)
@given(worlds(), st.sampled_from(methods()), st.data())
def test_worse_is_never_faster(
    world: tuple[Problem, SimulatedNetwork, int, int], method: str, data: st.DataObject
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

    def seconds(network: SimulatedNetwork, problem: Problem = problem) -> float:
        return simulate(method, problem, cluster_of(network, ranks_per_node), world_size).seconds

    before = seconds(network)
    assert seconds(replace(network, levels=(*inner, worse))) >= before * (1 - 1e-12)
    assert seconds(replace(network, asks_first=True)) >= before * (1 - 1e-12)
    more = replace(problem, batch=problem.batch + world_size)
    assert seconds(network, more) >= before * (1 - 1e-12)


@pytest.mark.parametrize("method", ["hierarchical", "butterfly", RING])
def test_a_thousand_ranks(method: str) -> None:
    cluster = CLUSTERS["three-level"]
    problem = Problem(1250, heads=(16, 16))
    run = simulate(method, problem, cluster, 1024)
    assert run.bytes_sent.max() == bytes_of_formula(method, problem, cluster.topology(1024))
    hops = {RING: 1023 * problem.kv_bytes / 0.125e9, "butterfly": 5 * 1e-3, "hierarchical": 1e-3}
    assert run.seconds > hops[method]


@pytest.mark.parametrize("strategy", strategies_package.strategies())
@pytest.mark.parametrize(
    "nodes", [(0,) * 2, (0,) * 7, (0, 0, 1, 1), (0, 0, 0, 0, 1, 1, 1, 1), tuple(range(8))]
)
def test_steps_are_those_of_the_formula(strategy: str, nodes: tuple[int, ...]) -> None:
    """An all-reduce counts as a ring's reduce-scatter and all-gather, all else as one trip."""
    topology, layout = Topology(nodes), Problem(0).layout
    found = strategies_package.STRATEGIES[strategy]
    trips = {"all_reduce": 2 * (len(nodes) - 1), "post": 0, "return": 0}
    steps = program_of(found, layout, topology, torch.bfloat16).steps
    formula = found.traffic(layout, topology, torch.bfloat16, False).steps
    assert sum(trips.get(step.name, 1) for step in steps) == formula


@pytest.mark.parametrize("gathers_directly", [False, True])
def test_gathers(gathers_directly: bool) -> None:
    """NCCL by its ring, the library over Gloo by a message to everybody."""
    cluster = cluster_of(one_level(gathers_directly=gathers_directly))
    problem = Problem(0, heads=(1, 1))
    run = simulate("all_gather", problem, cluster, 5)
    service = problem.layout.num_bytes / 10
    hops = 1 if gathers_directly else 4
    assert run.seconds == pytest.approx(hops + 4 * service)
