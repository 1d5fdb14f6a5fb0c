# SPDX-License-Identifier: BSD-3-Clause
"""Targets and tables of the CUDA benchmark, from synthetic rows."""

from typing import Any

import pytest

pytest.importorskip("triton")

from benchmarks.cuda import cases as shapes
from benchmarks.cuda import decode, tables, targets
from benchmarks.cuda.cases import CudaCase
from benchmarks.cuda.rows import PROBE, best_peer, ratio
from benchmarks.harness import report


def synthetic_row(case: CudaCase, ours: float, probe: float, **others: float) -> dict[str, Any]:
    times = {"lean_decode": ours, PROBE: probe, **others}
    return {
        "name": case.name,
        "section": case.section,
        "case": vars(case),
        "io_bytes": case.io_bytes,
        "read_bytes": case.read_bytes,
        "times": {n: {"median_us": t, "p10_us": t, "p90_us": t} for n, t in times.items()},
        "eager": {"lean_decode": {"median_us": ours + 10}},
        "accuracy": {"lean_decode": {"o_error": 1e-3}},
        "unavailable": {},
        "read_share": probe / ours,
        "ceiling_share": 0.8,
        "bandwidth": case.io_bytes / ours * 1e6,
        "wrong": False,
    }


def good_rows() -> list[dict[str, Any]]:
    """Rows that meet every target, with a little to spare."""
    large = CudaCase(lengths=(64 * 1024,))
    ragged, twin = shapes.ONE_LONG, shapes.uniform_twin(shapes.ONE_LONG)
    queries = CudaCase(shapes.QUERIES, lengths=(1024,), seqlen_q=4)
    capacity = CudaCase(shapes.CAPACITY, lengths=(1024,), capacity=65536)
    return [
        synthetic_row(shapes.LATENCY, 6.4, 4.0, cuDNN=6.4),
        synthetic_row(large, 100.0, 93.0, **{"torch flash": 98.0, "spin-wait": 150.0}),
        synthetic_row(
            ragged,
            103.0,
            97.0,
            **{"torch flash varlen": 160.0, "equal splits": 230.0, "spin-wait": 210.0},
        ),
        synthetic_row(twin, 100.0, 95.0),
        synthetic_row(queries, 10.0, 5.0, **{"torch flash": 16.0}),
        synthetic_row(capacity, 10.0, 5.0, **{"torch flash": 9.9, "torch flash varlen": 16.0}),
    ]


def verdicts(rows: list[dict[str, Any]]) -> list[bool | None]:
    return [target.met for target in targets.evaluate(rows)]


def test_targets_that_are_met() -> None:
    rows = good_rows()
    assert verdicts(rows) == [True] * 10
    assert targets.evaluate(rows)[2].text.startswith("met: <= 6.5 us for bf16 32/8 d128 B=1 1k")
    assert verdicts([]) == [None] * 10
    assert targets.evaluate([])[0].text.startswith("not measured: ")


@pytest.mark.parametrize(
    ("row", "name", "factor", "target"),
    [
        (2, PROBE, 0.97, 0),  # a larger share of the ceiling is left
        (1, PROBE, 0.90, 1),
        (0, "lean_decode", 1.02, 2),
        (3, "lean_decode", 0.97, 3),  # the uniform twin is faster
        (1, "torch flash", 0.98, 4),
        (2, "torch flash varlen", 0.96, 5),
        (5, "torch flash varlen", 0.93, 6),
        (4, "torch flash", 0.93, 7),
        (2, "equal splits", 0.89, 8),
        (2, "spin-wait", 0.95, 9),
    ],
)
def test_targets_that_are_missed(row: int, name: str, factor: float, target: int) -> None:
    rows = good_rows()
    times = rows[row]["times"]
    times[name]["median_us"] *= factor
    rows[row]["read_share"] = times[PROBE]["median_us"] / times["lean_decode"]["median_us"]
    assert verdicts(rows) == [i != target for i in range(10)]
    missed = targets.evaluate(rows)[target]
    assert missed.text.startswith("MISSED: ")
    if target != 2:
        assert rows[row if target != 3 else 2]["name"] in missed.detail


def test_wrong_rows_meet_no_target() -> None:
    rows = good_rows()
    rows[0]["wrong"] = True
    assert verdicts(rows)[2] is None


def test_best_peer_is_neither_ours_nor_the_probe() -> None:
    row = good_rows()[2]
    assert best_peer(row) == ("torch flash varlen", 160.0)
    for name in ("unsplit", "68 workers"):
        row["times"][name] = {"median_us": 90.0}
    assert best_peer(row) == ("torch flash varlen", 160.0), "our kernel under other schedules"
    assert best_peer(good_rows()[3]) is None
    assert ratio(row, "spin-wait") == 210.0 / 103.0 and ratio(row, "cuDNN") is None


def test_tables_of_synthetic_rows() -> None:
    rows = [*good_rows(), decode.failed_row("one that failed", "RuntimeError: why")]
    result = report.Report(
        "synthetic", "A title", tables.NOTES, {"read ceiling": "1 GB/s"}, rows,
        tables.columns(rows),
    )  # fmt: skip
    text = report.markdown(result)
    assert "| one that failed | - | - |" in text and "WRONG" in text
    assert result.wrong == ["one that failed"]
    assert "6.40" in text and "equal us" in text
    assert tables.line(rows[0]).startswith("bf16 32/8 d128 B=1 1k: 62 % of the read probe")
    assert tables.line(rows[-1]) == "one that failed: WRONG RuntimeError: why"
