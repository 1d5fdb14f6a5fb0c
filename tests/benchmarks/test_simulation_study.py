# SPDX-License-Identifier: BSD-3-Clause
"""The simulation's reports."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

from benchmarks.simulation import (
    Problem,
    published,
    study,
)

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_memory_is_the_papers() -> None:
    problem = Problem(64_000, heads=(16, 16))
    beside = published.paper_elements(problem)
    assert beside.tree == 2 * 2048 + 2 * 16
    assert beside.ring == 2 * 64_000 * 2048 + 2 * 2048
    assert 2 * (beside.ring - beside.tree) == pytest.approx(524e6, rel=1e-3)  # of Figure 4
    assert "ring - tree 524.3 MB; Figure 4 measured 524 MB" in published.memory_sentences()[0]


def test_published_numbers() -> None:
    comparisons = published.comparisons()
    by_ranks = [c for c in comparisons if c.unit == "x"]
    assert [c.published for c in by_ranks] == [None, None, 8.0]
    assert by_ranks[0].error is None and by_ranks[2].error == by_ranks[2].simulated / 8 - 1
    largest = by_ranks[2]
    more = published.overhead_that_explains(largest.tree_seconds, largest.ring_seconds, 8.0)
    assert (largest.ring_seconds + more) / (largest.tree_seconds + more) == pytest.approx(8.0)
    differences = {c.what: c.published for c in comparisons if c.unit == "ms"}
    assert len(differences) == 8
    assert min(differences.values()) == pytest.approx(6.156, rel=1e-3)


def test_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main = runpy.run_path(str(BENCHMARKS / "simulate.py"))["main"]
    assert main(["--cluster", "two-level", "--ranks", "4", "8", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "Fastest at the longest context: B = 1 " in printed and "B = 64 " in printed
    rows = json.loads((tmp_path / "simulation_strategies.json").read_text())["rows"]
    assert {(row["cluster"], row["world_size"]) for row in rows} == {
        ("two-level", 4),
        ("two-level", 8),
    }
    for row in rows:
        times = {method: row["methods"][method]["seconds"] for method in study.CANONICAL}
        assert times[row["best"]] == min(times.values()) and not row["wrong"]
    for name in ("simulation", "simulation_strategies"):
        assert (tmp_path / f"{name}.png").stat().st_size > 10_000
    assert "Figure 3: ring / tree, 128 H100" in (tmp_path / "simulation.md").read_text()
    with pytest.raises(SystemExit):
        main(["--ranks", "1"])
    assert "a world has two ranks or more" in capsys.readouterr().err
