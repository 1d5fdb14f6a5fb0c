# SPDX-License-Identifier: BSD-3-Clause
"""Benchmarks on emulated clusters: results that are timed are checked, and formulas are what ranks
send."""

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.harness.places import load_parts
from benchmarks.harness.report import write
from distributed import run_ranks
from lab.emulation import LINKS, clusters, contexts, fake_attention
from lab.emulation import rank as rank_program
from lab.emulation.clusters import CANONICAL, choice_of
from lab.emulation.configuration import row_of, topology_of
from lab.emulation.rank import AUTO
from lab.papers.tree_allreduce import NAME as TREE_ALLREDUCE
from lab.simulation import RING, RING_PASS_Q, RINGS, bytes_of_formula
from tree_attention import strategies


def a_case(batch: int, methods: list[str]) -> dict[str, Any]:
    numbers = {"batch": batch, "keys": 3, "seconds_per_key": 1e-5, "min_rounds": 2}
    return {**numbers, "one_memory": batch == 1, "methods": methods}


def run_on_ranks(rank: int, world_size: int, case: dict[str, Any]) -> dict[str, Any]:
    with torch.inference_mode():
        return rank_program.run_case(case, seconds=0.0)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("batch", [1, 16])
def test_formulas_are_what_ranks_send(world_size: int, batch: int) -> None:
    case = a_case(batch, [*strategies(), "one_shot", AUTO, *RINGS])
    methods = run_ranks(run_on_ranks, world_size, case)[0]
    assert list(methods) == [*strategies(), AUTO, *RINGS]  # those of this machine
    # The ranks of this test share a host, as the first four of two-level share a node.
    row = row_of("two-level", world_size, case, methods)
    assert not row["wrong"]
    for name, method in methods.items():
        assert method["right"] and len(method["seconds"]) >= 2, name
        assert min(method["seconds"]) > 0 and method["bytes"] == method["formula_bytes"], name
    assert methods[AUTO]["chosen"] in CANONICAL
    assert methods[AUTO]["bytes"] == methods[methods[AUTO]["chosen"]]["bytes"]
    methods["all_gather"]["bytes"] += 1
    assert row_of("two-level", world_size, case, methods)["wrong"]


def with_two_key_heads(rank: int, world_size: int) -> int:
    fake_attention.NUM_HEADS_KV = 2  # of this process, which ends with the test
    with torch.inference_mode():
        result = rank_program.run_case(a_case(1, [RING_PASS_Q]), seconds=0.0)[RING_PASS_Q]
    assert result["right"]
    return result["bytes"]


def test_ranks_without_heads_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries of two key heads over three ranks."""
    monkeypatch.setattr(fake_attention, "NUM_HEADS_KV", 2)
    problem = fake_attention.problem_of(1, 3)
    formula = bytes_of_formula(RING_PASS_Q, problem, topology_of("lan", 3))
    assert run_ranks(with_two_key_heads, 3, fresh=True) == [formula] * 3


def loses_a_state(rank: int, world_size: int) -> bool:
    real = fake_attention.FakeAttention.__call__  # of this process, likewise

    def forgetful(self: Any, *arguments: Any, **options: Any) -> Any:
        o, lse = real(self, *arguments, **options)
        return o, lse.fill_(-torch.inf) if rank == 1 else lse

    fake_attention.FakeAttention.__call__ = forgetful  # type: ignore[method-assign]
    return run_on_ranks(rank, world_size, a_case(1, ["all_gather"]))["all_gather"]["right"]


def test_wrong_results_are_found() -> None:
    assert run_ranks(loses_a_state, 2, fresh=True) == [False, False]


def a_row(link: str, keys: int, times: dict[str, float]) -> dict[str, Any]:
    """As it comes from a configuration of two ranks; auto chooses all_gather."""
    methods: dict[str, dict[str, Any]] = {}
    topology = topology_of(link, 2)
    for name, seconds in times.items():
        chosen = {"chosen": "all_gather"} if name == AUTO else {}
        problem = fake_attention.problem_of(1, keys)
        num_bytes = bytes_of_formula(chosen.get("chosen", name), problem, topology)
        counted = {"bytes": num_bytes, "rounds": 1, "wire_bytes": 9}
        spread = [0.9 * seconds, seconds, 1.2 * seconds]
        methods[name] = {"seconds": spread, "right": True, **counted, **chosen}
    return row_of(link, 2, {"batch": 1, "keys": keys, "seconds_per_key": 1e-9}, methods)


def a_part(*rows: dict[str, Any]) -> dict[str, Any]:
    link = {"link": "a link", "round_trip_ms": [1, 2, 3], "gbit_per_second": [4, 5, 6]}
    return {"rows": list(rows), "links": [link], "other_load": 0.5, "costs": {"exchanges": []}}


def test_choices_are_compared_with_the_best_strategy() -> None:
    times = dict.fromkeys(strategies(), 3e-3) | {"butterfly": 1e-3, AUTO: 1.25e-3}
    choice = choice_of(a_row("lan", 8, times))
    assert choice is not None and (choice["best"], choice["chosen"]) == ("butterfly", "all_gather")
    assert choice["ratio"] == pytest.approx(1.25) and choice["chosen_ratio"] == pytest.approx(3)
    assert choice["overlaps"]
    apart = choice_of(a_row("lan", 8, times | {AUTO: 2e-3}))
    assert apart is not None and not apart["overlaps"]
    # Sums are no canonical strategy, however fast.
    sums = choice_of(a_row("lan", 8, times | {"three_allreduce": 1e-6}))
    assert sums is not None and sums["best"] == "butterfly"
    assert sums["published"] == "three_allreduce" and sums["published_ratio"] == pytest.approx(1e-3)
    trees = choice_of(a_row("lan", 8, times | {TREE_ALLREDUCE: 2.5e-3}))
    assert trees is not None and trees["published"] == TREE_ALLREDUCE
    assert trees["published_ratio"] == pytest.approx(2.5)
    # The shipped rule takes all_gather for two ranks.
    assert choice["rule"] == "all_gather" and choice["rule_ratio"] == pytest.approx(3)
    assert choice_of(a_row("lan", 8, {RING: 1.0})) is None


def test_report_keeps_rows_of_other_runs(tmp_path: Path) -> None:
    times = {**dict.fromkeys([*strategies(), *RINGS], 3e-3), "butterfly": 1e-3, AUTO: 2e-3}
    rows = [a_row("lan", 8, times), a_row("metro", 8, {**times, AUTO: 1.05e-3})]
    parts = {"lan/2": a_part(rows[0]), "metro/2": a_part(rows[1])}
    report = clusters.report_of(parts)
    assert not report.wrong and "other processes took up to 50 %" in report.warnings[0]
    assert (
        "calibrated auto, in its own calls, is within 10 % of the best strategy in 1 of 2 rows; in "
        "the median 1.52 times the best, at worst 2.00 times (lan p=2 B=1 n=8)"
    ) in report.summary
    assert (
        "the strategy that the shipped rule takes is within 10 % of the best strategy in 0 of 2 "
        "rows; in the median 3.00 times the best, at worst 3.00 times (lan p=2 B=1 n=8)"
    ) in report.summary
    assert (
        "lan p=2 B=1 n=8: butterfly is fastest, 3.0 times as fast as three_allreduce; auto takes "
        "all_gather: 2.00 times the best (spreads apart), in that strategy's own row 3.00; the "
        "shipped rule takes all_gather: 3.00"
    ) in report.summary
    assert any(sentence.startswith("lan/2, link a link: round") for sentence in report.summary)
    write(report, tmp_path)
    table = (tmp_path / "cluster.md").read_text()
    assert "| lan p=2 B=1 n=8 | butterfly | 1.00 | 0.92 to 1.16 (3) | 16,512 | 9 | 1 |" in table
    assert "| lan p=2 B=1 n=8 | auto: all_gather | 2.00 |" in table
    again = load_parts(tmp_path / "cluster.json")
    assert list(again) == ["lan/2", "metro/2"]
    assert clusters.report_of(again).columns == report.columns


def test_one_link_alone_is_a_report_of_its_own() -> None:
    assert clusters.name_of(["metro/2", "metro/16"]) == "cluster_metro"
    assert clusters.name_of(["metro/2", "lan/2"]) == "cluster"


def test_rings_are_also_told_at_line_rate(tmp_path: Path) -> None:
    times = {AUTO: 1e-2, **dict.fromkeys(RINGS, 7.0)}
    row = a_row("metro", 65536, times)
    # One hop of 4096 bytes per key at 1 Gb/s, and the attention to the last shard.
    expected = 8 * 65536 * 4096 / 1e9 + 65536e-9
    assert contexts.line_rate_seconds(row) == pytest.approx(expected)
    slow = {**row, "seconds_per_key": 1e-4}  # the transfer hides behind attention
    assert contexts.line_rate_seconds(slow) == pytest.approx(2 * 65536e-4)
    report = contexts.report_of({"metro/2": a_part(row)})
    assert (
        f"metro/2: ring / tree by keys per rank: 700.0 at 65,536; with the ring at line rate: "
        f"{expected / 1e-2:.1f} at 65,536 (there 2.15 s for the longest instead of 7.00 s)"
    ) in report.summary
    write(report, tmp_path)
    assert load_parts(tmp_path / "contexts.json")["metro/2"]["rows"] == [row]


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
