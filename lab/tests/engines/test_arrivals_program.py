# SPDX-License-Identifier: BSD-3-Clause
"""Short requests at random times to vLLM: commands, and what the report makes of answers."""

from typing import Any

from benchmarks.harness.report import Report
from lab.engines import arrivals

MIB = 1 << 20


def row(answered: int, resident_bytes: int, **changes: Any) -> dict[str, Any]:
    return {
        "engine": "ours, one host",
        "answered": answered,
        "same": 100,
        "other": 0,
        "lost": 0,
        "reasons": [],
        "first_token_seconds": [0.01, 0.02, 0.09],
        "last_token_seconds": [0.1, 0.2, 0.3],
        "resident_bytes": resident_bytes,
        **changes,
    }


def column(report: Report, heading: str) -> list[str]:
    [found] = (column.values for column in report.columns if column.heading == heading)
    return list(found)


def test_figures_of_answers() -> None:
    report = arrivals.report_of([row(1000, 10 * MIB), row(2000, 12 * MIB), row(3000, 12 * MIB)], 20)
    assert column(report, "first token ms (median, largest)")[0] == "20, 90"
    assert column(report, "memory MiB") == ["10", "12", "12"]
    assert column(report, "right") == ["yes"] * 3 and not report.warnings


def test_a_lost_answer_is_wrong_and_its_reason_is_told() -> None:
    lost = row(200, MIB, lost=1, reasons=["InternalServerError"])
    report = arrivals.report_of([row(100, MIB), lost, row(300, MIB)], 20)
    assert column(report, "right") == ["yes", "WRONG", "yes"]
    assert report.warnings == ["ours, one host, 200 answered: InternalServerError"]


def test_another_answer_than_alone_is_wrong() -> None:
    report = arrivals.report_of([row(100, MIB), row(200, MIB, other=1)], 20)
    assert column(report, "right") == ["yes", "WRONG"]


def growing(engine: str, mib_per_thousand: int) -> list[dict[str, Any]]:
    step = mib_per_thousand * MIB // 10
    rows = [row(100 * i, 500 * MIB + step * i) for i in range(1, 7)]
    return [one | {"engine": engine} for one in rows]


def test_memory_that_grows_more_than_that_of_vllm_is_wrong() -> None:
    report = arrivals.report_of(growing("vllm, one host", 10) + growing("ours, one host", 20), 20)
    assert report.warnings == [
        "ours, one host: a host grows by 20.0 MiB in 1,000 requests, vllm's by 10.0"
    ]
    assert column(report, "right")[-1] == "WRONG"
    alike = growing("vllm, one host", 10) + growing("ours, two hosts, TP 2", 26)
    assert not arrivals.report_of(alike, 20).warnings  # 13 a host


def test_an_engine_that_ends_is_named() -> None:
    report = arrivals.report_of([{"engine": "ours, one host", "reason": "no memory"}], 20)
    assert report.warnings == ["ours, one host, 0 answered: no memory"]


def test_commands_of_the_hosts() -> None:
    assert "--nnodes" not in arrivals.command(1, 0)
    first, second = (" ".join(arrivals.command(2, host)) for host in range(2))
    assert "--node-rank 0 --master-addr host0" in first and "--headless" not in first
    assert "--node-rank 1 --master-addr host0 --headless" in second


def test_prompts_are_the_same_in_each_run_and_of_all_lengths() -> None:
    lengths = [len(prompt) for prompt in arrivals.prompts()]
    assert arrivals.prompts() == arrivals.prompts() and len(lengths) == arrivals.NUM_PROMPTS
    assert min(lengths) >= 4 and max(lengths) <= 200
