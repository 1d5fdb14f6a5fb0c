# SPDX-License-Identifier: BSD-3-Clause
"""bench_cluster: what it times gives right results, and its formulas are what ranks send."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import bench_cluster, cluster_rank
from benchmarks.cluster import LINKS, Wiring
from benchmarks.cluster_model import costs_of, work_of
from benchmarks.cluster_rank import RINGS

from distributed import run_ranks
from tree_attention import strategies
from tree_attention.bench.report import write
from tree_attention.exchange.costs import DEFAULT_COSTS, Costs
from tree_attention.exchange.traffic import Traffic

FREE = Costs(*[0.0] * 9)


def run_on_ranks(rank: int, world_size: int, case: dict[str, Any]) -> dict[str, Any]:
    with torch.inference_mode():
        return cluster_rank.run_case(case, world_size, rank, seconds=0.0)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("batch", [1, 16])
def test_formulas_are_what_ranks_send(world_size: int, batch: int) -> None:
    case = {"batch": batch, "keys": 3, "seconds_per_key": 1e-5}
    case["ways"] = [*strategies(), *cluster_rank.RINGS]
    ways = run_ranks(run_on_ranks, world_size, case)[0]
    assert list(ways) == case["ways"]
    # The ranks of this test share a host, as the first four of two-level share a node.
    wiring = LINKS["two-level"]
    for name, way in ways.items():
        assert way["right"], name
        assert len(way["seconds"]) >= 5 and min(way["seconds"]) > 0
        work = work_of(name, wiring, world_size, batch, 3)
        assert (way["bytes"], way["rounds"]) == (work.bytes_sent, work.rounds), name


def loses_a_state(rank: int, world_size: int) -> bool:
    real = cluster_rank.PretendedAttention.__call__  # of this process, which ends with the test

    def forgetful(self: Any, *arguments: Any, **options: Any) -> Any:
        o, lse = real(self, *arguments, **options)
        return o, lse.fill_(-torch.inf) if rank == 1 else lse

    cluster_rank.PretendedAttention.__call__ = forgetful  # type: ignore[method-assign]
    case = {"batch": 1, "keys": 3, "seconds_per_key": 0.0, "ways": ["all_gather"]}
    return run_on_ranks(rank, world_size, case)["all_gather"]["right"]


def test_wrong_results_are_found() -> None:
    assert run_ranks(loses_a_state, 2, fresh=True) == [False, False]


def test_two_levels_have_the_costs_of_each() -> None:
    lan, metro = DEFAULT_COSTS["nccl"], DEFAULT_COSTS["gloo"]
    calibrated = {LINKS["lan"]: lan, LINKS["metro"]: metro}
    assert costs_of(LINKS["lan"], calibrated) is lan
    both = costs_of(LINKS["two-level"], calibrated)
    assert both is not None and both.steps_between == metro.steps_between
    assert both.steps_inside == lan.steps_between and both.bytes_inside == lan.bytes_between
    assert costs_of(LINKS["two-level"], {LINKS["metro"]: metro}) is None
    assert costs_of(Wiring(LINKS["two-level"].between), {}) is None


def test_the_slower_of_transfer_and_attention_counts() -> None:
    seconds_per_byte = 1e-9
    costs = Costs(**{**vars(FREE), "bytes_between": seconds_per_byte})
    shard = 2 * 8 * 1000 * 128 * 2
    for attention in (0.0, 0.002, 1.0):
        work = work_of("ring", LINKS["lan"], 4, 1, 1000, attention)
        manifests = 3 * (work.bytes_sent // 3 - shard) * seconds_per_byte
        hop = max(attention, shard * seconds_per_byte)
        assert work.seconds(costs) == pytest.approx(manifests + 3 * hop + attention)
    tree = work_of("all_gather", LINKS["lan"], 4, 1, 1000, 1.0)
    assert tree.seconds(FREE) == 1.0 and isinstance(tree.once, Traffic)


def row(way: str, **counted: int) -> dict[str, Any]:
    work = work_of(way, LINKS["lan"], 2, 1, 8)
    sent = {"bytes": work.bytes_sent, "rounds": work.rounds, "wire_bytes": 9, **counted}
    ways = {name: {"seconds": [1e-3] * 5, "right": True} for name in bench_cluster.strategies()}
    ways = {way: {**ways[way], **sent}}
    return {
        "name": "lan p=2 B=1 n=8",
        **{"link": "lan", "world_size": 2, "batch": 1, "keys": 8, "seconds_per_key": 0.0},
        **{"part": "context", "ways": ways, "wrong": False},
    }


def test_other_bytes_than_the_formula_are_wrong() -> None:
    for counted, wrong in (({}, False), ({"bytes": 1}, True), ({"rounds": 7}, True)):
        this = row("all_gather", **counted)
        bench_cluster.add_predictions(this, FREE)
        assert this["wrong"] == wrong
        assert this["ways"]["all_gather"]["predicted_seconds"] == 0.0


def full_row(link: str, part: str, times: dict[str, float]) -> dict[str, Any]:
    ways = {}
    for way, seconds in times.items():
        work = work_of(way, LINKS[link], 2, 1, 8)
        counted = {"bytes": work.bytes_sent, "rounds": work.rounds, "wire_bytes": 9}
        ways[way] = {"seconds": [0.9 * seconds, seconds, 1.2 * seconds], "right": True, **counted}
    sizes = {"link": link, "world_size": 2, "batch": 1, "keys": 8, "seconds_per_key": 0.0}
    return {"name": f"{link} p=2 B=1 n=8", "part": part, **sizes, "ways": ways, "wrong": False}


def test_report_keeps_rows_of_other_runs(tmp_path: Path) -> None:
    step = full_row("lan", "step", dict.fromkeys(bench_cluster.strategies(), 3e-3))
    step["ways"]["butterfly"]["seconds"] = [1e-3] * 3
    context = full_row("metro", "context", {"all_gather": 2e-3, **dict.fromkeys(RINGS, 7e-3)})
    link = {"link": "a link", "round_trip_ms": [1, 2, 3], "gbit_per_second": [4, 5, 6]}
    costs = asdict(FREE)
    parts = {
        "lan/2": {"rows": [step], "links": [link], "other_load": 0.5, "costs": costs},
        "metro/2": {"rows": [context], "links": [], "other_load": None, "costs": None},
    }
    report = bench_cluster.report_of(parts)
    assert not report.wrong and "other processes took up to 50 %" in report.warnings[0]
    assert (
        "lan p=2 B=1 n=8: butterfly is fastest, 3.0 times as fast as three_allreduce; auto takes "
        "all_gather, 3.00 times it" in report.summary
    )
    for start in ("metro p=2 B=1 n=8: times of the tree's: ring 3.50", "lan/2, link a link: round"):
        assert any(sentence.startswith(start) for sentence in report.summary)
    write(report, tmp_path)
    assert (tmp_path / "cluster.png").stat().st_size > 1000
    table = (tmp_path / "cluster.md").read_text()
    assert "| lan p=2 B=1 n=8 | butterfly | 1.00 | 1.00 to 1.00 | 0.00 | -100 % |" in table
    again = bench_cluster.load_parts(tmp_path / "cluster.json")
    assert list(again) == ["lan/2", "metro/2"]
    assert bench_cluster.report_of(again).columns == report.columns
