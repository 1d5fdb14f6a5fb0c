# SPDX-License-Identifier: BSD-3-Clause
"""How "auto" chooses: traffic counted as it is sent, costs fitted to measurements, one choice."""

from __future__ import annotations

import io
import json
import math
import os
import time
from dataclasses import astuple, fields, replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from distributed import run_ranks
from tree_attention import ExchangeError, strategies, tree_decode
from tree_attention.__main__ import main
from tree_attention.cli import calibrate
from tree_attention.cli.world import World
from tree_attention.exchange import Communicator, Topology
from tree_attention.exchange.calibration import Sample, fit
from tree_attention.exchange.clocks import Clock
from tree_attention.exchange.costs import (
    DEFAULT_COSTS,
    LINK_TYPES,
    Calibration,
    Costs,
    LinkType,
    choose,
    costs_for,
    explain,
    shipped_costs,
)
from tree_attention.exchange.measured import MeasuredExchange, MeasuredExchanges
from tree_attention.exchange.state import Message
from tree_attention.exchange.strategies import STRATEGIES, candidates
from tree_attention.exchange.traffic import Case, Traffic, traffic

F32, BF16 = torch.float32, torch.bfloat16
NAMES = [field.name for field in fields(Costs)]
FREE = Costs(*(0.0 for _ in NAMES))


def case(
    nodes: str,
    rows: int,
    head_dim: int = 128,
    dtype: torch.dtype = F32,
    sharded: bool = False,
    backend: str = "gloo",
) -> Case:
    message = Message((1, rows, 1), head_dim, dtype)
    return Case(Topology.of(nodes), message, dtype, sharded, backend)


def test_every_count_has_a_cost() -> None:
    assert [field.name for field in fields(Traffic)] == NAMES
    assert all(min(astuple(costs)) > 0 for costs in DEFAULT_COSTS.values())
    work = Traffic(*range(1, len(NAMES) + 1))
    for i, name in enumerate(NAMES):
        assert replace(FREE, **{name: 2.0}).seconds(work) == 2.0 * (i + 1)


def count_bytes(rank: int, world_size: int, nodes: str) -> dict[tuple[str, str], int]:
    comm = Communicator(nodes=nodes)
    sent = {}
    o, lse = torch.ones(1, 10, 1, 12), torch.zeros(1, 10, 1)
    for strategy in strategies():
        for payload_dtype in (F32, BF16):
            for head_sharded in (False, True):
                if strategy not in candidates(payload_dtype, head_sharded):
                    continue
                before = comm.bytes_sent
                options = {"payload_dtype": payload_dtype, "head_sharded": head_sharded}
                comm.exchange(o, lse, strategy, payload_dtype, **options)
                sent[strategy, payload_dtype, head_sharded] = comm.bytes_sent - before
    return sent


@pytest.mark.parametrize("nodes", ["aa", "ab", "aaa", "aabb", "aaab", "aaaaa", "aabbcc", "aaaabbc"])
def test_predicted_bytes_are_those_sent(nodes: str) -> None:
    by_rank = run_ranks(count_bytes, len(nodes), nodes)
    for (strategy, dtype, sharded), _ in by_rank[0].items():
        work = traffic(strategy, case(nodes, 10, 12, dtype, sharded))
        assert work.bytes_sent == max(sent[strategy, dtype, sharded] for sent in by_rank)
        assert work.steps_between == work.bytes_between == 0 or len(set(nodes)) > 1


def steps(strategy: str, nodes: str, backend: str) -> tuple[int, int]:
    work = traffic(strategy, case(nodes, 64, backend=backend))
    return work.steps_inside, work.steps_between


def test_steps_over_gloo() -> None:
    """Of 8 ranks. A question, its answer, and answers to what was asked at the same time."""
    one, two, eight = "a" * 8, "a" * 4 + "b" * 4, "abcdefgh"

    def of(strategy: str) -> list[tuple[int, int]]:
        return [steps(strategy, nodes, "gloo") for nodes in (one, two, eight)]

    assert of("all_gather") == [(2, 0), (0, 2), (0, 2)]
    assert of("two_phase") == [(3, 0), (0, 3), (0, 3)]
    assert of("hierarchical") == [(3, 0), (2, 2), (0, 2)]
    assert of("butterfly") == [(4, 0), (2, 2), (0, 4)]
    # A library's ring asks in every step, and every step waits for the slowest link.
    assert of("three_allreduce") == [(84, 0), (0, 84), (0, 84)]
    assert of("max_then_sum") == [(56, 0), (0, 56), (0, 56)]


def test_steps_over_nccl() -> None:
    """Its rings are pipelines, and a round of messages is launched like any collective."""
    one, two, eight = "a" * 8, "a" * 4 + "b" * 4, "abcdefgh"

    def of(strategy: str) -> list[tuple[int, int]]:
        return [steps(strategy, nodes, "nccl") for nodes in (one, two, eight)]

    assert of("all_gather") == [(7, 0), (5, 2), (0, 7)]
    assert of("two_phase") == [(8, 0), (5, 3), (0, 8)]
    assert of("hierarchical") == [(2, 0), (2, 1), (0, 7)]
    assert of("butterfly") == [(3, 0), (2, 1), (0, 3)]
    assert of("three_allreduce") == [(42, 0), (30, 12), (0, 42)]
    launches = {"all_gather": 1, "two_phase": 2, "hierarchical": 3, "butterfly": 3}
    for strategy, number in launches.items():
        assert traffic(strategy, case(two, 64, backend="nccl")).collectives == number
        over_gloo = traffic(strategy, case(two, 64)).collectives
        assert over_gloo == (strategy == "two_phase")


def test_bytes_between_nodes() -> None:
    """Slices of a quarter from one rank of each, not whole states from all."""
    two = "a" * 4 + "b" * 4
    message = case(two, 64).message.num_bytes
    assert traffic("hierarchical", case(two, 64)).bytes_between == message // 4
    assert traffic("all_gather", case(two, 64)).bytes_between == 4 * message
    assert traffic("all_gather", case(two, 64, backend="nccl")).bytes_between == 7 * message


@pytest.mark.parametrize("world_size", [2, 3, 5, 6, 7, 9, 64])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_a_butterfly_is_as_long_as_its_longest_chain(world_size: int, dtype: torch.dtype) -> None:
    """Of ranks that wait for each other, not of the rank that sends most."""
    levels = math.ceil(math.log2(world_size))
    for backend, questions in (("gloo", 1), ("nccl", 0)):
        this = case("a" * world_size, 64, dtype=dtype, backend=backend)
        work = traffic("butterfly", this)
        assert work.steps_inside == levels + questions
        assert work.collectives == (levels if backend == "nccl" else 0)
        assert work.local_operations == 1 + levels


nodes_of_ranks = st.text("abc", min_size=2, max_size=24)
costs_of_any_kind = st.builds(
    Costs, *(st.floats(0, 1e-3 if "bytes" not in name else 1e-8) for name in NAMES)
)


@settings(max_examples=200, deadline=None)
@given(
    nodes_of_ranks,
    st.integers(1, 4096),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["gloo", "nccl"]),
    costs_of_any_kind,
)
def test_choice(
    nodes: str, rows: int, half: bool, sharded: bool, backend: str, costs: Costs
) -> None:
    """A pure function of shared numbers: the canonical strategy of the least predicted time."""
    this = case(nodes, rows, 128, BF16 if half else F32, sharded, backend)
    name = choose(this, costs)
    assert STRATEGIES[name].is_canonical and name in candidates(this.message.dtype, sharded)
    times = {
        other: costs.seconds(traffic(other, this))
        for other in candidates(this.message.dtype, sharded, canonical=True)
    }
    assert times[name] == min(times.values())
    # The names of nodes do not matter, and neither do the objects that hold the numbers.
    renamed = Topology.of(nodes.translate({97: 120, 98: 121, 99: 122}))
    assert choose(replace(this, topology=renamed), Costs(*astuple(costs))) == name
    more = case(nodes, 2 * rows, 128, this.message.dtype, sharded, backend)
    for other, seconds in times.items():
        assert costs.seconds(traffic(other, more)) >= seconds


def test_choices_of_the_shipped_constants() -> None:
    nvlink = DEFAULT_COSTS["nccl"]
    one_node, cluster = "a" * 8, "".join(chr(97 + rank // 8) for rank in range(64))
    assert choose(case(one_node, 32, backend="nccl"), nvlink) == "all_gather"
    large = case(one_node, 64 * 128, backend="nccl")
    assert choose(large, nvlink) in ("two_phase", "hierarchical")
    assert choose(case(cluster, 2048, backend="nccl"), nvlink) == "hierarchical"
    # A slow wire between many hosts wants few bytes, a long one few steps.
    slow = replace(FREE, bytes_between=1.0)
    far = replace(FREE, steps_between=1.0, messages=1e-6)
    assert choose(case("abcdefgh", 64), slow) == "two_phase"
    assert choose(case("abcdefgh", 64), far) == "all_gather"
    assert choose(case("abcdefgh", 64, backend="nccl"), far) == "butterfly"
    assert choose(case("aabb", 64), FREE) == "all_gather"  # the first of equals


def test_fit_finds_the_constants_of_its_samples() -> None:
    torch.manual_seed(0)
    truth = Costs(*(1e-6 * torch.rand(len(NAMES)).double()).tolist())
    works = [Traffic(*torch.randint(0, 9, (len(NAMES),)).tolist()) for _ in range(40)]
    samples = [Sample("", 0, work, truth.seconds(work)) for work in works]
    fitted = fit(samples, FREE)
    for name in NAMES:
        assert getattr(fitted, name) == pytest.approx(getattr(truth, name), rel=1e-6)
    # What a count costs that no sample has is not made up, and no cost is negative.
    works = [replace(work, steps_between=0, bytes_between=0) for work in works]
    noise = (1 + 2 * torch.rand(len(works))).tolist()
    samples = [Sample("", 0, w, truth.seconds(w) * x) for w, x in zip(works, noise, strict=True)]
    fitted = fit(samples, replace(FREE, steps_between=7.0, bytes_between=8.0))
    assert (fitted.steps_between, fitted.bytes_between) == (7.0, 8.0)
    assert min(astuple(fitted)) >= 0


sizes = st.lists(st.integers(1, 10_000), min_size=1, max_size=5, unique=True)
times = st.floats(1e-6, 1.0)


@settings(max_examples=100, deadline=None)
@given(nodes_of_ranks, st.data())
def test_measured_exchanges_correct_the_model(nodes: str, data: st.DataObject) -> None:
    """A measured size has its measured time; between two the ratio is between theirs, beyond them
    it is that of the next."""
    costs = data.draw(st.builds(Costs, *(st.floats(1e-9, 1e-3) for _ in NAMES)))
    topology = Topology.of(nodes)
    rows = {name: sorted(data.draw(sizes)) for name in strategies()}
    exchanges = tuple(
        MeasuredExchange(name, num_rows, 128, data.draw(times))
        for name in data.draw(st.permutations(strategies()))
        for num_rows in data.draw(st.permutations(rows[name]))
    )
    calibration = Calibration(costs, MeasuredExchanges("gloo", topology.nodes, exchanges))
    ratios: dict[tuple[str, int], float] = {}
    for exchange in exchanges:
        this = case(nodes, exchange.num_rows)
        predicted = calibration.predict(exchange.strategy, this)
        assert predicted == pytest.approx(exchange.seconds, rel=1e-12)
        assert calibration.are_measured(exchange.strategy, this)
        ratios[exchange.strategy, exchange.num_rows] = exchange.seconds / costs.predict(
            exchange.strategy, this
        )
    for name in strategies():
        this = case(nodes, data.draw(st.integers(1, 20_000)))
        ratio = calibration.predict(name, this) / costs.predict(name, this)
        around = rows[name][:1] + [n for n in rows[name] if n <= this.message.num_rows]
        below = ratios[name, around[-1]]
        around = [n for n in rows[name] if n >= this.message.num_rows] + rows[name][-1:]
        above = ratios[name, around[0]]
        assert min(below, above) * (1 - 1e-9) <= ratio <= max(below, above) * (1 + 1e-9)
    fastest = choose(this, calibration)
    assert calibration.predict(fastest, this) == min(
        calibration.predict(name, this) for name in candidates(F32, False, canonical=True)
    )
    # Other links and other work are the bare model's.
    for other in (
        case(nodes + "z", 7),
        case(nodes, 7, backend="nccl"),
        case(nodes, 7, sharded=True),
    ):
        for name in candidates(F32, other.head_sharded):
            assert calibration.predict(name, other) == costs.predict(name, other)
            assert not calibration.are_measured(name, other)


def test_what_was_not_measured_is_modelled() -> None:
    costs, only = DEFAULT_COSTS["gloo"], MeasuredExchange("butterfly", 32, 128, 1e-9)
    calibration = Calibration(costs, MeasuredExchanges("gloo", (0, 0, 1, 1), (only,)))
    this = case("aabb", 32)
    assert calibration.predict("all_gather", this) == costs.predict("all_gather", this)
    assert choose(this, calibration) == "butterfly" != choose(this, costs)
    lines = explain(this, calibration, "butterfly").splitlines()[1:]
    assert {line.split()[0] for line in lines if " us measured " in line} == {"butterfly"}
    assert sum(" us modelled " in line for line in lines) == len(strategies()) - 1
    # Of one size the last measurement counts; a model of nothing is not corrected.
    again = replace(calibration.measured, exchanges=(only, replace(only, seconds=1.0)))
    assert Calibration(costs, again).predict("butterfly", this) == pytest.approx(1.0)
    assert Calibration(FREE, again).predict("butterfly", this) == 0.0


def test_costs_of_another_backend_are_not_used() -> None:
    gloo, nccl = DEFAULT_COSTS["gloo"], DEFAULT_COSTS["nccl"]
    measured = Calibration(FREE, MeasuredExchanges("gloo", (0, 1), ()))
    assert costs_for("gloo", measured) is measured and costs_for("nccl", measured) is nccl
    assert costs_for("nccl", FREE) is FREE  # of a caller who knows
    assert costs_for("gloo", None) is gloo and costs_for("another", None) is gloo


def test_shipped_constants_are_those_of_links() -> None:
    near, far = LinkType(1.0, 2.0), LinkType(3.0, 4.0)
    others = {name: 9.0 for name in NAMES if not name.startswith(("steps", "bytes"))}
    costs = shipped_costs(near, far, **others)
    assert (costs.steps_inside, costs.bytes_inside) == (1.0, 2.0)
    assert (costs.steps_between, costs.bytes_between) == (3.0, 4.0)
    for backend, inside, between in (
        ("nccl", "nvlink", "infiniband"),
        ("gloo", "loopback", "ethernet"),
    ):
        shipped = DEFAULT_COSTS[backend]
        assert shipped.steps_inside == LINK_TYPES[inside].step
        assert shipped.bytes_between == LINK_TYPES[between].byte


def test_file_of_constants(tmp_path: Path) -> None:
    path, costs = tmp_path / "costs.json", DEFAULT_COSTS["nccl"]
    costs.save(path, host="here")
    assert Costs.load(path) == costs and json.loads(path.read_text())["host"] == "here"
    assert Costs.load(path).digest == costs.digest != DEFAULT_COSTS["gloo"].digest
    assert Calibration.load(path) == Calibration(costs)
    contents = json.loads(path.read_text())
    for change in ({"messages": -1.0}, {"messages": "NaN"}, {"messages": "x"}, {"pigeons": 1.0}):
        bad = contents | {"seconds_per": contents["seconds_per"] | change}
        path.write_text(json.dumps(bad))
        with pytest.raises(ValueError, match=r"costs.json holds no exchange costs: "):
            Costs.load(path)
    for text in ("{", "[]", "{}", '{"seconds_per": {}}'):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"costs.json holds no exchange costs: "):
            Costs.load(path)
    with pytest.raises(ValueError, match="holds no exchange costs: FileNotFoundError"):
        Costs.load(tmp_path / "nothing.json")
    # Constants that were fitted to other counts.
    del contents["format"]
    for version in ({}, {"format": 1}):
        path.write_text(json.dumps(contents | version))
        with pytest.raises(ValueError, match=r"costs of this version, .*; calibrate again"):
            Calibration.load(path)


def test_file_of_measured_exchanges(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    exchanges = (MeasuredExchange("butterfly", 32, 128, 1e-3),)
    measured = MeasuredExchanges("gloo", (0, 1), exchanges)
    calibration = Calibration(DEFAULT_COSTS["gloo"], measured)
    calibration.save(path, host="here")
    assert Calibration.load(path) == calibration and Costs.load(path) == calibration.costs
    contents = json.loads(path.read_text())
    # Every number of it counts when ranks compare.
    digests = {calibration.digest, Calibration(calibration.costs).digest}
    for change in ({"num_rows": 33}, {"head_dim": 64}, {"seconds": 2e-3}, {"strategy": "ring"}):
        contents["measured"]["exchanges"] = [{**vars(exchanges[0]), **change}]
        path.write_text(json.dumps(contents))
        digests.add(Calibration.load(path).digest)
    assert len(digests) == 6
    for change in ({"seconds": -1.0}, {"seconds": "inf"}, {"num_rows": "x"}, {"seconds": None}):
        contents["measured"]["exchanges"] = [{**vars(exchanges[0]), **change}]
        path.write_text(json.dumps(contents))
        with pytest.raises(ValueError, match=r"costs.json holds no exchange costs: "):
            Calibration.load(path)
    contents["measured"] = {"nodes": [0, 1]}
    path.write_text(json.dumps(contents))
    with pytest.raises(ValueError, match=r"costs.json holds no exchange costs: KeyError"):
        Calibration.load(path)


def test_table() -> None:
    lines = explain(case("aabb", 32), DEFAULT_COSTS["gloo"], "butterfly").splitlines()
    assert lines[0] == (
        "exchange of 32 rows of 128 (16,512 bytes) over 4 ranks, 2 nodes of 2 ranks:"
    )
    assert sorted(line.split()[0] for line in lines[1:]) == sorted(strategies())
    times = [float(line.split()[1].replace(",", "")) for line in lines[1:]]
    assert times == sorted(times)
    assert [line.split()[0] for line in lines if line.endswith("<-")] == ["butterfly"]


def choose_by_file(rank: int, world_size: int, path: str) -> None:
    q, kv = torch.ones(1, 8, 1, 16), torch.ones(1, 2, 5, 16)
    state = 8 * 17 * 4
    with mock.patch.dict(os.environ, {"TREE_ATTENTION_COSTS": path}):
        comm = Communicator(nodes="abcd")
    with mock.patch("builtins.print") as printed:
        tree_decode(q, kv, kv, group=comm, explain=True)
    assert comm.bytes_sent == 2 * 3 * state // 4  # two_phase
    lines = [call.args[0] for call in printed.call_args_list]
    assert len(lines) == (rank == 0)
    assert rank > 0 or "two_phase" in next(s for s in lines[0].splitlines() if "<-" in s)
    comm = Communicator(nodes="abcd", costs=replace(FREE, steps_between=1.0, messages=1e-6))
    tree_decode(q, kv, kv, group=comm)
    assert comm.bytes_sent == 3 * state and comm.link.num_operations == 1  # straight to everybody
    comm = Communicator(costs=DEFAULT_COSTS["nccl" if rank == 1 else "gloo"])
    with pytest.raises(ExchangeError, match=r"costs is \w+ on rank 1, \w+ on rank 0"):
        tree_decode(q, kv, kv, group=comm)


def test_constants_decide(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    replace(FREE, bytes_between=1.0).save(path)
    run_ranks(choose_by_file, 4, str(path))


def agree_on_time(rank: int, world_size: int) -> None:
    comm = Communicator()
    with mock.patch.object(time, "perf_counter", lambda: time.monotonic() + 1000.0 * rank):
        clock = Clock.agree(comm.link, torch.device("cpu"), time.monotonic() + 60.0)
        now = clock.now()
    # Hosts of one machine share a monotonic clock, and all ranks read rank 0's.
    assert abs(clock.offset + 1000.0 * rank) < 10.0 and abs(now - time.monotonic()) < 10.0
    assert rank > 0 or clock.offset == 0.0


def test_ranks_agree_on_the_time() -> None:
    run_ranks(agree_on_time, 3)


def calibrate_ranks(rank: int, world_size: int, out: str) -> tuple[Calibration, str]:
    console = Console(file=io.StringIO(), width=120)
    world = World(rank, world_size)
    outdated = {"TREE_ATTENTION_COSTS": "/no/such/file"}
    with mock.patch.dict(os.environ, {"TREE_ATTENTION_NODE": str(rank // 2), **outdated}):
        calibration = calibrate.run(world, torch.device("cpu"), 0.0, Path(out), console)
    return calibration, console.file.getvalue()


def test_calibration(tmp_path: Path) -> None:
    out = tmp_path / "costs.json"
    results = run_ranks(calibrate_ranks, 4, str(out))
    calibration = Calibration.load(out)
    assert [found for found, _ in results] == [calibration] * 4
    assert [bool(text) for _, text in results] == [True, False, False, False]
    assert "Exchanges, until the last rank is done" in results[0][1]
    assert out.with_suffix(".png").stat().st_size > 0
    content = json.loads(out.read_text())
    assert content["measured_on"]["topology"] == "2 nodes of 2 ranks"
    measured = {sample["operation"] for sample in content["samples"]}
    assert measured == {*strategies(), "all-gather", "all-to-all", "all-reduce", "merge",
                        "messages to all", "pairs of nodes", "pairs in a node"}  # fmt: skip
    assert all(sample["seconds"] > 0 for sample in content["samples"])
    # Where it was measured, auto takes what was fastest.
    assert calibration.measured is not None
    assert (calibration.measured.backend, calibration.measured.nodes) == ("gloo", (0, 0, 1, 1))
    for batch in (1, 4, 16, 64):
        of_size = {
            exchange.strategy: exchange.seconds
            for exchange in calibration.measured.exchanges
            if exchange.num_rows == 32 * batch
        }
        assert set(of_size) == set(strategies())
        names = candidates(F32, False, canonical=True)
        assert choose(case("aabb", 32 * batch), calibration) == min(names, key=of_size.__getitem__)


def test_calibration_needs_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate"]) == 2
    assert "calibrate: there is nothing to measure alone" in capsys.readouterr().out
