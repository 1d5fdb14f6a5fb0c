# SPDX-License-Identifier: BSD-3-Clause
"""`calibrate`: the table that it writes, and a sentence for every mistake."""

import io
import json
import os
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from rich.console import Console

from distributed import run_ranks
from tree_attention import strategies
from tree_attention.__main__ import main
from tree_attention.cli import calibration
from tree_attention.cli.world import World
from tree_attention.exchange import Topology
from tree_attention.exchange.auto.choose import CostTable, Measured, MeasuredHost, choose
from tree_attention.exchange.calibration import BATCHES
from tree_attention.exchange.strategies import STRATEGIES
from tree_attention.exchange.transport.buffers import StateLayout

CPU = torch.device("cpu")
HOSTS = (
    MeasuredHost("a", 6e10, 5e10, 2e12, 64e9, 2e-4),
    MeasuredHost("b", 2e10, 1e10, 1e12, 32e9, 9e-4),
)


def calibrate_ranks(rank: int, world_size: int, out: str) -> str:
    console = Console(file=io.StringIO(), width=120)
    with mock.patch.dict(os.environ, {"TREE_ATTENTION_NODE": str(rank // 2)}):
        calibration.run(World(rank, world_size), CPU, 0.0, Path(out), console)
    return console.file.getvalue()


@pytest.mark.deep
def test_calibration(tmp_path: Path) -> None:
    out = tmp_path / "costs.json"
    texts = run_ranks(calibrate_ranks, 4, str(out), fresh=True)  # which know their nodes not yet
    assert [bool(text) for text in texts] == [True, False, False, False]
    assert "Exchanges in us, until the last rank is done" in texts[0]
    assert out.with_suffix(".png").stat().st_size > 0
    assert json.loads(out.read_text())["topology"] == "2 nodes of 2 ranks"
    canonical = {name for name in strategies() if STRATEGIES[name].is_canonical}
    table = CostTable.load(out)
    assert (table.backend, table.nodes) == ("gloo", (0, 0, 1, 1))
    assert len(table.exchanges) == len(BATCHES) * len(canonical)
    for rank, machine in enumerate(table.machines):
        assert machine.read > 1e7 and machine.flop > 1e7 and machine.memory > 1e6
        assert f"rank {rank} ({machine.host}): reads " in texts[0]
    assert len(table.machines) == 4
    for batch in BATCHES:
        layout = StateLayout((batch, 32, 1), 128, torch.float32)
        times = {e.strategy: e.seconds for e in table.exchanges if e.num_bytes == layout.num_bytes}
        assert set(times) == canonical
        choice = choose(layout, Topology.of("aabb"), "gloo", costs=table)
        assert choice.strategy == min(times, key=times.__getitem__)


def test_choice_of_auto_has_a_star() -> None:
    table = calibration.table(
        {"butterfly": {64: 2e-6, 128: 3e-6}, "two_phase": {64: 1e-6, 128: 4e-6}}
    )
    columns = [list(column.cells) for column in table.columns]
    assert columns == [["butterfly", "two_phase"], ["2", "*1"], ["*3", "4"]]


def test_unequal_hosts_are_named() -> None:
    assert calibration.of_hosts(HOSTS) == [
        "rank 0 (a): reads 60 GB/s of keys and 50 of weights, 2 TFLOP/s, 0.2 ms a layer, "
        "64 GB free",
        "rank 1 (b): reads 20 GB/s of keys and 10 of weights, 1 TFLOP/s, 0.9 ms a layer, "
        "32 GB free",
        "rank 1 reads at 33% of the speed of rank 0: with equal parts the others wait for it; see "
        "--shares of generate and plan",
    ]
    assert len(calibration.of_hosts((HOSTS[0], replace(HOSTS[0], read=5.5e10)))) == 2


def test_calibration_needs_no_matplotlib(tmp_path: Path) -> None:
    out = tmp_path / "costs.json"
    console = Console(file=io.StringIO(), width=120)
    table = CostTable("gloo", (0, 1), (Measured("all_gather", 1024, 0.25),))
    with (
        mock.patch.object(calibration, "calibrate", lambda *_: table),
        mock.patch.object(calibration, "measure_all", lambda *_: (HOSTS, None)),
        mock.patch.object(calibration.importlib.util, "find_spec", lambda name: None),
    ):
        calibration.run(World(), CPU, 0.0, out, console)
    table = replace(table, machines=HOSTS)
    assert CostTable.load(out) == table and not out.with_suffix(".png").exists()
    assert "no picture without matplotlib: pip install matplotlib" in console.file.getvalue()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "one process has no exchange to measure; start several: tree-attention run -n 2"),
        (["--out", "/nowhere/costs.json"], "--out /nowhere/costs.json: there is no directory"),
        (["--out", "/"], "--out /: this is a directory; name a file"),
        (["--out", "costs.png"], "--out costs.png: name the table"),
        (["--seconds", "0"], "--seconds must be above 0 and at most 10,000,000 seconds, got 0"),
        (["--device", "cuda"], "--device cuda needs a GPU for each process of this machine, which"),
    ],
)
def test_calibration_says_what_to_put_right(
    arguments: list[str],
    sentence: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["calibrate", *arguments]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert error.startswith(f"calibrate: {sentence}")
