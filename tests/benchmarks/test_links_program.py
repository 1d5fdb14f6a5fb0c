# SPDX-License-Identifier: BSD-3-Clause
"""links.py: what is measured and fitted, inside a node and between nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import links
from benchmarks.harness.ranks import Ranks
from benchmarks.harness.report import write
from distributed import run_ranks

SIZES = (1024, 65536)
OPERATIONS = ["send/recv inside a node", "send/recv between nodes", "all-reduce", "all-gather"]


def measured(rank: int, world_size: int) -> list[dict[str, Any]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TREE_ATTENTION_NODE", f"node{rank // 2}")
        return links.measure(SIZES, 0.01, torch.device("cpu"), Ranks())


def test_every_operation_is_right(tmp_path: Path) -> None:
    rows, *others = run_ranks(measured, 3)
    assert all(rows == other for other in others)
    assert [row["operation"] for row in rows] == [name for name in OPERATIONS for _ in SIZES]
    assert all(row["seconds"] > 0 and not row["wrong"] for row in rows)
    report = links.report_of(rows, "3 ranks by Gloo")
    assert [sentence.split(":")[0] for sentence in report.summary] == OPERATIONS
    write(report, tmp_path)
    assert "| send/recv between nodes | 65,536 |" in (tmp_path / "links.md").read_text()


def unsent(rank: int, world_size: int) -> list[dict[str, Any]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(links, "_all_reduce", lambda x: x)
        return links.measure(SIZES[:1], 0.01, torch.device("cpu"), Ranks())


def test_wrong_results_are_noticed() -> None:
    wrong = {row["operation"]: row["wrong"] for row in run_ranks(unsent, 2)[0]}
    assert wrong == {OPERATIONS[0]: False, "all-reduce": True, "all-gather": False}


def test_peers() -> None:
    """The first other rank of the node, and the first of another node."""
    inside, between, *_ = links.operations(2, ["a", "b", "b", "a"])
    assert inside.expected == (3.0, 3.0) and between.expected == (3.0, 3.0)
    assert links.operations(3, ["a", "b", "b", "a"])[0].expected == (1.0, 1.0)
    assert links.operations(1, ["a", "b", "b", "a"])[1].expected == (1.0, 1.0)
    assert [o.name for o in links.operations(0, ["a", "b"])] == OPERATIONS[1:]


def test_a_line_is_found() -> None:
    sizes = [1024, 4096, 65536, 1 << 20]
    line = links.fit(sizes, [1e-4 + 2e-9 * size for size in sizes])
    assert line.alpha == pytest.approx(1e-4) and line.beta == pytest.approx(2e-9)
    # Errors count relative to the time: the largest message does not decide alone.
    disturbed = links.fit(sizes, [1e-4, 1e-4 + 8e-6, 2.3e-4, 3e-3])
    assert disturbed.alpha == pytest.approx(1e-4, rel=0.1)


def test_no_gpu_is_said_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="2"):
        links.main(["--device", "cuda"])
    message = "error: --device cuda: torch finds no CUDA driver or no device"
    assert capsys.readouterr().err.strip().endswith(message)
