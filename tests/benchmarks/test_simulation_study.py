# SPDX-License-Identifier: BSD-3-Clause
"""The simulation's reports: the study, and the validation by measured rows."""

from __future__ import annotations

import json
import runpy
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.simulation import (
    CLUSTERS,
    RING,
    Problem,
    headlines,
    published,
    simulate,
    study,
    validation,
)
from tree_attention.exchange.costs import Costs

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_memory_is_the_papers() -> None:
    tree, ring = headlines.memory_elements(keys_per_rank=64_000, batch=1, heads=16, head_dim=128)
    assert ring == 4 * 64_000 * 2048 + 2 * 2048
    assert tree == 2 * 64_000 * 2048 + 2 * 2048 + 2 * 16
    assert 2 * (ring - tree) == pytest.approx(524e6, rel=1e-3)  # measured, Figure 4


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


def write_rows(path: Path, rows: object) -> Path:
    path.write_text(json.dumps({"rows": rows}))
    return path


def test_validation(tmp_path: Path) -> None:
    exact = simulate("all_gather", Problem(0, 16), CLUSTERS["metro"], 4).seconds
    flat = {"link": "metro", "world": 4, "batch": 16, "strategy": "all_gather", "seconds": exact}
    whole = {
        **{"link": "metro", "world_size": 4, "batch": 16, "keys": 64, "seconds_per_key": 1e-3},
        "ways": {RING: {"seconds": [9.0, 1.0, 2.0]}, "butterfly": {"seconds": [1.1]}},
    }
    empty = {"only_predicted": True, "link": "metro", "world_size": 4, "ways": {RING: {}}}
    measured = validation.read(write_rows(tmp_path / "rows.json", [flat, whole, empty]))
    assert [(m.strategy, m.seconds, m.keys) for m in measured] == [
        ("all_gather", exact, 0),
        (RING, 2.0, 64),
        ("butterfly", 1.1, 64),
    ]
    # Of a cluster that computes attention in no time; on the metro it would take some.
    free = replace(CLUSTERS["metro"], key_bandwidth=float("inf"))
    predicted = simulate("all_gather", Problem(0, 16), free, 4).seconds
    predictions = [validation.predict(m) for m in measured]
    assert predictions[0].seconds == predicted
    # Four shards of 16 * 64 keys, a millisecond each, behind which the transfers hide.
    assert predictions[1].seconds == pytest.approx(4 * 16 * 64e-3, rel=0.05)
    assert predictions[1].error == predictions[1].seconds / 2.0 - 1
    assert validation.median_error(predictions) == sorted(abs(p.error) for p in predictions)[1]


def test_software_is_fitted() -> None:
    software = validation.Software(2, 4e-4, 3e-4, 1e-4, 1e-4, 5e-5, 1.6e-5, 2e-5)
    rows = [
        validation.Measured(link, 4, batch, way, seconds=1.0)
        for link in ("lan", "metro")
        for batch in (1, 64)
        for way in ("all_gather", "butterfly", "three_allreduce")
    ]
    rows = [replace(row, seconds=validation.predict(row, software).seconds) for row in rows]
    assert validation.median_error([validation.predict(row) for row in rows]) > 0.2
    fitted = validation.fit(rows, processors=2)
    assert fitted.processors == 2
    assert validation.median_error([validation.predict(row, fitted) for row in rows]) < 0.05
    other = replace(rows[0], world=8, batch=16)
    expected = validation.predict(other, software).seconds
    assert validation.predict(other, fitted).seconds == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"link": "moon"}, "no cluster is called 'moon'"),
        ({"strategy": "pigeons"}, "no strategy or ring is called 'pigeons'"),
        ({"seconds": 0.0}, "times are positive and of several ranks"),
        ({"seconds": "soon"}, "holds no measured rows"),
    ],
)
def test_what_cannot_be_validated(change: dict[str, object], message: str, tmp_path: Path) -> None:
    row = {"link": "lan", "world": 4, "batch": 1, "strategy": "butterfly", "seconds": 1.0}
    with pytest.raises(ValueError, match=message):
        validation.read(write_rows(tmp_path / "rows.json", [{**row, **change}]))
    with pytest.raises(ValueError, match="holds no measured rows: the list is empty"):
        validation.read(write_rows(tmp_path / "rows.json", []))


def test_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main = runpy.run_path(str(BENCHMARKS / "simulate.py"))["main"]
    costs = tmp_path / "my_cluster.json"
    Costs(*(1e-6,) * 9).save(costs)
    options = ["--costs", str(costs), "--ranks-per-node", "2", "--ranks", "4", "8"]
    assert main([*options, "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "Fastest at the longest context: B = 1 " in printed and "B = 64 " in printed
    rows = json.loads((tmp_path / "simulation_strategies.json").read_text())["rows"]
    assert {(row["cluster"], row["world_size"]) for row in rows} == {
        ("my_cluster", 4),
        ("my_cluster", 8),
    }
    for row in rows:
        times = {way: row["ways"][way]["seconds"] for way in study.CANONICAL}
        assert times[row["best"]] == min(times.values()) and not row["wrong"]
    memory_rows = json.loads((tmp_path / "simulation_memory.json").read_text())["rows"]
    for row in memory_rows:
        ring, tree = (row["ways"][way] for way in (RING, "all_gather"))
        assert ring > 2.9 * tree if row["world_size"] > 2 else ring > 1.9 * tree
    for name in ("simulation", "simulation_strategies", "simulation_memory"):
        assert (tmp_path / f"{name}.png").stat().st_size > 10_000
    assert "Figure 3: ring / tree, 128 H100" in (tmp_path / "simulation.md").read_text()
    row = {"link": "lan", "world": 4, "batch": 1, "strategy": "butterfly", "seconds": 1.0}
    capsys.readouterr()
    assert main(["--validate", str(write_rows(tmp_path / "rows.json", [row]))]) == 0
    assert "Median error of 1 predictions: 100%; 0 are within 20 %." in capsys.readouterr().out
    options = ["--validate", str(tmp_path / "rows.json"), "--fit"]
    assert main([*options, "lan/4", "--out", str(tmp_path)]) == 0
    assert "lan/4 (fitted): median error" in (tmp_path / "simulation_validation.md").read_text()
    assert (tmp_path / "simulation_validation.png").stat().st_size > 10_000
    capsys.readouterr()
    assert main([*options, "lan/8"]) == 2
    assert "--fit takes some of the configurations of" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["--ranks", "1"])
    assert "a world has two ranks or more" in capsys.readouterr().err
