# SPDX-License-Identifier: BSD-3-Clause
"""The simulation's reports."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.simulation import study
from lab.simulation.__main__ import main


def test_program(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found, report_of = [], study.strategies_report
    monkeypatch.setattr(
        study, "strategies_report", lambda rows: found.append(rows) or report_of(rows)
    )
    assert main(["--cluster", "two-level", "--ranks", "4", "8", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "Fastest at the longest context: B = 1 " in printed and "B = 64 " in printed
    (rows,) = found
    assert {(row["cluster"], row["world_size"]) for row in rows} == {
        ("two-level", 4),
        ("two-level", 8),
    }
    for row in rows:
        times = {method: row["methods"][method]["seconds"] for method in study.CANONICAL}
        assert times[row["best"]] == min(times.values()) and not row["wrong"]
    for name in ("simulation", "simulation_strategies"):
        assert (tmp_path / f"{name}.md").stat().st_size > 1000
    with pytest.raises(SystemExit):
        main(["--ranks", "1"])
    assert "a world has two ranks or more" in capsys.readouterr().err
