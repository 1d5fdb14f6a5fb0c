# SPDX-License-Identifier: BSD-3-Clause
"""Short requests at random times to vLLM: commands, and what the report makes of answers."""

from typing import Any

import pytest

from benchmarks.engines import arrivals
from benchmarks.harness.report import Report

MIB = 1 << 20


def row(answered: int, resident_bytes: int, **changes: Any) -> dict[str, Any]:
    return {
        "engine": "one host",
        "answered": answered,
        "same": 100,
        "other": 0,
        "lost": 0,
        "first_token_seconds": [0.01, 0.02, 0.09],
        "last_token_seconds": [0.1, 0.2, 0.3],
        "resident_bytes": resident_bytes,
        **changes,
    }


def column(report: Report, heading: str) -> list[str]:
    [found] = (column.values for column in report.columns if column.heading == heading)
    return list(found)


def test_figures_of_answers() -> None:
    report = arrivals.report_of([row(100, 10 * MIB), row(200, 12 * MIB), row(300, 12 * MIB)], 20)
    assert column(report, "first token ms (median, largest)")[0] == "20, 90"
    assert column(report, "memory MiB") == ["10", "12", "12"]
    assert column(report, "right") == ["yes"] * 3 and not report.warnings


@pytest.mark.parametrize("changes", [{"lost": 1}, {"other": 1}], ids=["lost", "other tokens"])
def test_a_lost_or_other_answer_is_wrong(changes: dict[str, Any]) -> None:
    report = arrivals.report_of([row(100, MIB), row(200, MIB, **changes), row(300, MIB)], 20)
    assert column(report, "right") == ["yes", "WRONG", "yes"]


def test_memory_that_grows_is_wrong() -> None:
    rows = [row(answered, answered * MIB // 100) for answered in range(100, 600, 100)]
    report = arrivals.report_of(rows, 20)
    assert report.warnings == ["one host: memory grows by 10.0 MiB for 1,000 requests"]
    assert column(report, "right")[-1] == "WRONG"


def test_an_engine_that_ends_is_named() -> None:
    report = arrivals.report_of([{"engine": "one host", "reason": "no memory"}], 20)
    assert report.warnings == ["one host, 0 answered: no memory"]


def test_commands_of_the_hosts() -> None:
    assert "--nnodes" not in arrivals.command(1, 0)
    first, second = (" ".join(arrivals.command(2, host)) for host in range(2))
    assert "--node-rank 0 --master-addr host0" in first and "--headless" not in first
    assert "--node-rank 1 --master-addr host0 --headless" in second


def test_prompts_are_the_same_in_each_run_and_of_all_lengths() -> None:
    lengths = [len(prompt) for prompt in arrivals.prompts()]
    assert arrivals.prompts() == arrivals.prompts() and len(lengths) == arrivals.NUM_PROMPTS
    assert min(lengths) >= 4 and max(lengths) <= 200
