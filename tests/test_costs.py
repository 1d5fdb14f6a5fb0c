# SPDX-License-Identifier: BSD-3-Clause
"""How "auto" chooses: traffic counted as it is sent, costs fitted to measurements, one choice."""

from __future__ import annotations

import json
import os
from dataclasses import astuple, fields, replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distributed import run_ranks
from tree_attention import ExchangeError, strategies, tree_decode
from tree_attention.__main__ import main
from tree_attention.cli import calibrate
from tree_attention.cli.world import World
from tree_attention.exchange import Communicator, Topology
from tree_attention.exchange.calibration import Sample, fit
from tree_attention.exchange.costs import DEFAULT_COSTS, Costs, choose, explain
from tree_attention.exchange.state import Message
from tree_attention.exchange.strategies import STRATEGIES, candidates
from tree_attention.exchange.traffic import Case, Traffic, traffic

F32, BF16 = torch.float32, torch.bfloat16
NAMES = [field.name for field in fields(Costs)]
FREE = Costs(*(0.0 for _ in NAMES))


def case(
    nodes: str, rows: int, head_dim: int = 128, dtype: torch.dtype = F32, sharded: bool = False
) -> Case:
    return Case(Topology.of(nodes), Message((1, rows, 1), head_dim, dtype), dtype, sharded)


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


def test_steps() -> None:
    """Of 8 ranks, as the strategies are described."""

    def steps(strategy: str, nodes: str) -> tuple[int, int]:
        work = traffic(strategy, case(nodes, 64))
        return work.steps_inside, work.steps_between

    one, two, eight = "a" * 8, "a" * 4 + "b" * 4, "abcdefgh"
    assert [steps("all_gather", nodes) for nodes in (one, two, eight)] == [(7, 0), (5, 2), (0, 7)]
    assert [steps("two_phase", nodes) for nodes in (one, two)] == [(8, 0), (5, 3)]
    assert [steps("hierarchical", n) for n in (one, two, eight)] == [(2, 0), (2, 1), (0, 1)]
    assert [steps("butterfly", n) for n in (one, two, eight)] == [(3, 0), (2, 1), (0, 3)]
    assert steps("three_allreduce", one) == (42, 0) and steps("max_then_sum", eight) == (0, 28)
    # Between nodes: slices of a quarter from one rank of each, not whole states from all.
    message = case(two, 64).message.num_bytes
    assert traffic("hierarchical", case(two, 64)).bytes_between == message // 4
    assert traffic("all_gather", case(two, 64)).bytes_between == 7 * message


nodes_of_ranks = st.text("abc", min_size=2, max_size=24)
costs_of_any_kind = st.builds(
    Costs, *(st.floats(0, 1e-3 if "bytes" not in name else 1e-8) for name in NAMES)
)


@settings(max_examples=200, deadline=None)
@given(nodes_of_ranks, st.integers(1, 4096), st.booleans(), st.booleans(), costs_of_any_kind)
def test_choice(nodes: str, rows: int, half: bool, sharded: bool, costs: Costs) -> None:
    """A pure function of shared numbers: the canonical strategy of the least predicted time."""
    this = case(nodes, rows, dtype=BF16 if half else F32, sharded=sharded)
    name = choose(this, costs)
    assert STRATEGIES[name].is_canonical and name in candidates(this.message.dtype, sharded)
    times = {
        other: costs.seconds(traffic(other, this))
        for other in candidates(this.message.dtype, sharded, canonical=True)
    }
    assert times[name] == min(times.values())
    # The names of nodes do not matter, and neither do the objects that hold the numbers.
    renamed = case(nodes.translate({97: 120, 98: 121, 99: 122}), rows, dtype=this.message.dtype)
    assert choose(replace(renamed, head_sharded=sharded), Costs(*astuple(costs))) == name
    more = case(nodes, 2 * rows, dtype=this.message.dtype, sharded=sharded)
    for other, seconds in times.items():
        assert costs.seconds(traffic(other, more)) >= seconds


def test_choices_of_the_shipped_constants() -> None:
    nvlink = DEFAULT_COSTS["nccl"]
    one_node, cluster = "a" * 8, "".join(chr(97 + rank // 8) for rank in range(64))
    assert choose(case(one_node, 32), nvlink) == "all_gather"
    assert choose(case(one_node, 64 * 128), nvlink) in ("two_phase", "hierarchical")
    assert choose(case(cluster, 2048), nvlink) == "hierarchical"
    # A slow wire between many hosts wants few bytes, a long one few steps.
    slow = replace(FREE, bytes_between=1.0)
    far = replace(FREE, steps_between=1.0, messages=1e-6)
    assert choose(case("abcdefgh", 64), slow) == "two_phase"
    assert choose(case("abcdefgh", 64), far) == "hierarchical"
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


def test_file_of_constants(tmp_path: Path) -> None:
    path, costs = tmp_path / "costs.json", DEFAULT_COSTS["nccl"]
    costs.save(path, host="here")
    assert Costs.load(path) == costs and json.loads(path.read_text())["host"] == "here"
    assert Costs.load(path).digest == costs.digest != DEFAULT_COSTS["gloo"].digest
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


def calibrate_ranks(rank: int, world_size: int, out: str) -> Costs:
    console = mock.Mock()
    world = World(rank, world_size)
    with mock.patch.dict(os.environ, {"TREE_ATTENTION_NODE": str(rank // 2)}):
        costs = calibrate.run(world, torch.device("cpu"), 0.0, Path(out), console)
    assert console.print.called == (rank == 0)
    return costs


def test_calibration(tmp_path: Path) -> None:
    out = tmp_path / "costs.json"
    results = run_ranks(calibrate_ranks, 4, str(out))
    assert results == [Costs.load(out)] * 4
    assert out.with_suffix(".png").stat().st_size > 0
    content = json.loads(out.read_text())
    assert content["measured_on"]["topology"] == "2 nodes of 2 ranks"
    measured = {sample["operation"] for sample in content["samples"]}
    assert measured == {*strategies(), "all-gather", "all-to-all", "all-reduce", "merge",
                        "messages to all", "pairs of nodes", "pairs in a node"}  # fmt: skip
    assert all(sample["seconds"] > 0 for sample in content["samples"])


def test_calibration_needs_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate"]) == 2
    assert "calibrate: there is nothing to measure alone" in capsys.readouterr().out
