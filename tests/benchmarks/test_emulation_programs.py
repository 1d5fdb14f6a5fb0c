# SPDX-License-Identifier: BSD-3-Clause
"""Benchmarks on emulated clusters: results that are timed are checked, and formulas are what ranks
send."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.emulation import LINKS, Wiring, clusters, contexts, fake_attention
from benchmarks.emulation import rank as rank_program
from benchmarks.emulation.clusters import CANONICAL, choice_of
from benchmarks.emulation.configuration import load_parts, row_of
from benchmarks.emulation.model import AUTO, add_predictions, costs_of, message_of, work_of
from benchmarks.emulation.rank import RINGS
from benchmarks.harness.report import write
from distributed import run_ranks
from tree_attention import strategies
from tree_attention.exchange.costs import DEFAULT_COSTS, FORMAT, Calibration, Costs
from tree_attention.exchange.measured import MeasuredExchange, MeasuredExchanges
from tree_attention.exchange.traffic import Traffic

STRATEGIES = (*CANONICAL, "three_allreduce", "max_then_sum")
FREE = Costs(*[0.0] * 9)


def a_case(batch: int, ways: list[str]) -> dict[str, Any]:
    numbers = {"batch": batch, "keys": 3, "seconds_per_key": 1e-5, "min_rounds": 2}
    return {**numbers, "one_memory": batch == 1, "ways": ways}


def run_on_ranks(rank: int, world_size: int, case: dict[str, Any]) -> dict[str, Any]:
    with torch.inference_mode():
        return rank_program.run_case(case, seconds=0.0)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("batch", [1, 16])
def test_formulas_are_what_ranks_send(world_size: int, batch: int) -> None:
    case = a_case(batch, [*strategies(), AUTO, *RINGS])  # which may need other machines
    ways = run_ranks(run_on_ranks, world_size, case)[0]
    assert list(ways) == [*STRATEGIES, AUTO, *RINGS]  # those of this machine
    # The ranks of this test share a host, as the first four of two-level share a node.
    row = row_of("two-level", world_size, case, ways)
    add_predictions(row, LINKS["two-level"], Calibration(FREE))
    assert not row["wrong"]
    for name, way in ways.items():
        assert way["right"] and len(way["seconds"]) >= 2 and min(way["seconds"]) > 0, name
        assert (way["bytes"], way["rounds"]) == (way["formula_bytes"], way["formula_rounds"]), name
    assert ways[AUTO]["chosen"] in CANONICAL
    assert ways[AUTO]["bytes"] == ways[ways[AUTO]["chosen"]]["bytes"]


def passes_queries(rank: int, world_size: int) -> tuple[int, int]:
    way = "ring, passing queries"
    with torch.inference_mode():
        result = rank_program.run_case(a_case(1, [way]), seconds=0.0)[way]
    assert result["right"]
    return result["bytes"], result["rounds"]


def test_ranks_without_heads_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries of two key heads over three ranks."""
    monkeypatch.setattr("benchmarks.emulation.model.NUM_HEADS_KV", 2)
    work = work_of("ring, passing queries", LINKS["lan"], 3, 1, 3)
    counted = run_ranks(with_two_key_heads, 3, fresh=True)
    assert counted == [(work.bytes_sent, work.rounds)] * 3


def with_two_key_heads(rank: int, world_size: int) -> tuple[int, int]:
    fake_attention.NUM_HEADS_KV = 2  # of this process, which ends with the test
    return passes_queries(rank, world_size)


def loses_a_state(rank: int, world_size: int) -> bool:
    real = fake_attention.PretendedAttention.__call__  # of this process, likewise

    def forgetful(self: Any, *arguments: Any, **options: Any) -> Any:
        o, lse = real(self, *arguments, **options)
        return o, lse.fill_(-torch.inf) if rank == 1 else lse

    fake_attention.PretendedAttention.__call__ = forgetful  # type: ignore[method-assign]
    return run_on_ranks(rank, world_size, a_case(1, ["all_gather"]))["all_gather"]["right"]


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


def a_row(link: str, keys: int, times: dict[str, float], **counted: int) -> dict[str, Any]:
    """As it comes from a configuration of two ranks; auto chooses all_gather."""
    ways: dict[str, dict[str, Any]] = {}
    for name, seconds in times.items():
        chosen = {"chosen": "all_gather"} if name == AUTO else {}
        work = work_of(chosen.get("chosen", name), LINKS[link], 2, 1, keys)
        sent = {"bytes": work.bytes_sent, "rounds": work.rounds, "wire_bytes": 9, **counted}
        spread = [0.9 * seconds, seconds, 1.2 * seconds]
        ways[name] = {"seconds": spread, "right": True, **sent, **chosen}
    return row_of(link, 2, {"batch": 1, "keys": keys, "seconds_per_key": 1e-9}, ways)


def a_part(*rows: dict[str, Any], costs: Costs | None = FREE) -> dict[str, Any]:
    link = {"link": "a link", "round_trip_ms": [1, 2, 3], "gbit_per_second": [4, 5, 6]}
    content = None if costs is None else {"format": FORMAT, "seconds_per": asdict(costs)}
    return {"rows": list(rows), "links": [link], "other_load": 0.5, "costs": content}


def test_other_bytes_than_the_formula_are_wrong() -> None:
    for counted, wrong in (({}, False), ({"bytes": 1}, True), ({"rounds": 7}, True)):
        row = a_row("lan", 8, {"all_gather": 1e-3}, **counted)
        add_predictions(row, LINKS["lan"], Calibration(FREE))
        assert row["wrong"] == wrong
        assert row["ways"]["all_gather"]["predicted_seconds"] == 8e-9  # the attention alone


def test_predictions_take_measured_exchanges() -> None:
    """For strategies that were measured on the same ranks; the constants alone know none."""
    rows = message_of(1).num_rows
    exchange = MeasuredExchange("butterfly", rows, 128, 2e-3)
    calibration = Calibration(DEFAULT_COSTS["gloo"], MeasuredExchanges("gloo", (0, 1), (exchange,)))
    row = a_row("lan", 8, dict.fromkeys(("butterfly", "all_gather", "ring"), 1e-3))
    add_predictions(row, LINKS["lan"], calibration, DEFAULT_COSTS["nccl"])
    ways = row["ways"]
    # Of a float32 result: a bf16 one is predicted to take as long, relative to the model.
    assert ways["butterfly"]["predicted_seconds"] == pytest.approx(2e-3, rel=0.01)
    assert ways["butterfly"]["modelled_seconds"] < 1e-3
    for name in ("all_gather", "ring"):
        assert ways[name]["predicted_seconds"] == pytest.approx(ways[name]["modelled_seconds"])
        assert 0 < ways[name]["extrapolated_seconds"] < ways[name]["modelled_seconds"]


def test_choices_are_compared_with_the_best_strategy() -> None:
    times = dict.fromkeys(STRATEGIES, 3e-3) | {"butterfly": 1e-3, AUTO: 1.25e-3}
    choice = choice_of(a_row("lan", 8, times))
    assert choice is not None and (choice["best"], choice["chosen"]) == ("butterfly", "all_gather")
    assert choice["ratio"] == pytest.approx(1.25) and choice["chosen_ratio"] == pytest.approx(3)
    assert choice["overlaps"]
    apart = choice_of(a_row("lan", 8, times | {AUTO: 2e-3}))
    assert apart is not None and not apart["overlaps"]
    # The two that sum are no canonical strategies, however fast.
    sums = choice_of(a_row("lan", 8, times | {"max_then_sum": 1e-6}))
    assert sums is not None and sums["best"] == "butterfly"
    assert choice_of(a_row("lan", 8, {"ring": 1.0})) is None


def test_report_keeps_rows_of_other_runs(tmp_path: Path) -> None:
    times = {**dict.fromkeys([*STRATEGIES, *RINGS], 3e-3), "butterfly": 1e-3, AUTO: 2e-3}
    rows = [a_row("lan", 8, times), a_row("metro", 8, {**times, AUTO: 1.05e-3})]
    parts = {"lan/2": a_part(rows[0]), "metro/2": a_part(rows[1])}
    parts["metro/4"] = a_part(costs=DEFAULT_COSTS["gloo"])  # for extrapolation
    report = clusters.report_of(parts)
    assert not report.wrong and "other processes took up to 50 %" in report.warnings[0]
    assert (
        "auto within 10 % of the best strategy in 1 of 2 rows, within 10 % or within the spread "
        "in 1; in the median 1.52 times the best, at worst 2.00 times (lan p=2 B=1 n=8)"
    ) in report.summary
    assert (
        "lan p=2 B=1 n=8: butterfly is fastest, 3.0 times as fast as three_allreduce; auto takes "
        "all_gather: 2.00 times the best (spreads apart), in that strategy's own row 3.00"
    ) in report.summary
    assert any(sentence.startswith("lan/2, link a link: round") for sentence in report.summary)
    ways = [row["ways"]["butterfly"] for row in report.rows]
    assert ways[0]["extrapolated_seconds"] is None and ways[1]["extrapolated_seconds"] > 0
    write(report, tmp_path)
    assert (tmp_path / "cluster.png").stat().st_size > 1000
    table = (tmp_path / "cluster.md").read_text()
    assert (
        "| lan p=2 B=1 n=8 | butterfly | 1.00 | 0.92 to 1.16 (3) | 0.00 | -100 % | -100 % | - |"
        in table
    )
    assert "| lan p=2 B=1 n=8 | auto: all_gather | 2.00 |" in table
    again = load_parts(tmp_path / "cluster.json")
    assert list(again) == ["lan/2", "metro/2", "metro/4"]
    assert clusters.report_of(again).columns == report.columns


def test_contexts_that_were_not_measured_are_predicted(tmp_path: Path) -> None:
    times = {AUTO: 1e-3, **dict.fromkeys(RINGS, 7e-3)}
    costs = Costs(**{**vars(FREE), "bytes_between": 1e-9})
    parts = {"lan/2": a_part(a_row("lan", 2048, times), costs=costs)}
    report = contexts.report_of(parts)
    assert [row["keys"] for row in report.rows] == list(contexts.CONTEXTS)
    last = report.rows[-1]["ways"]
    # Two messages of 4 bytes for each of 8 heads of 128, and the attention to the own shard.
    hop = 2**20 * 8 * 128 * 4 * 1e-9
    assert last["ring"]["predicted_seconds"] == pytest.approx(hop + 2**20 * 1e-9, rel=1e-3)
    text = next(sentence for sentence in report.summary if sentence.startswith("lan/2: ring"))
    assert "7.0 at 2,048," in text and "at 1,048,576 (predicted); the tree is faster at" in text
    write(report, tmp_path)
    assert (tmp_path / "contexts.png").stat().st_size > 1000
    assert load_parts(tmp_path / "contexts.json")["lan/2"]["rows"] == [report.rows[0]]


def test_contexts_fit_memory_and_time() -> None:
    def lengths(link: str, world_size: int, memory: int) -> list[int]:
        cases = contexts.cases(LINKS[link], world_size, 0.0, memory)
        return [case["keys"] for case in cases]

    assert lengths("lan", 2, 1 << 40) == list(contexts.CONTEXTS)
    # One rank would send 4 GiB at 1 Gb/s; seven hops of 256 MiB go.
    assert lengths("metro", 2, 1 << 40)[-1] == 1 << 18
    assert lengths("metro", 8, 1 << 40)[-1] == 1 << 16
    assert lengths("lan", 8, 8 << 30)[-1] == 8192 and lengths("lan", 8, 10 << 30)[-1] == 1 << 16
    assert lengths("lan", 2, 1 << 20) == []
