# SPDX-License-Identifier: BSD-3-Clause
"""tree.py with --device cuda, over a device that is not there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rich.progress import Progress

from benchmarks import tree
from benchmarks.harness import measure
from counted_device import PEAK, device_that_counts
from distributed import run_ranks

CUDA = torch.device("cuda", 0)
ARMS = {"all_gather", "three_allreduce", tree.RING, tree.AUTO}


def tree_on_a_device(rank: int, world_size: int) -> tuple[list[str], list[Any], dict[str, int]]:
    measure.last_level_cache_bytes = lambda: 1 << 16  # in a process of its own
    tree.pin_threads = lambda first: []  # type: ignore[assignment]
    with device_that_counts() as calls, Progress(disable=True) as progress:
        cases = tree.quick_cases()
        report = tree.run(cases, progress, seconds=0.0, local_rank=rank, device=CUDA)
    return report.wrong, report.rows, calls


def test_tree_program() -> None:
    for wrong, rows, calls in run_ranks(tree_on_a_device, 2, fresh=True):
        assert not wrong and len(rows) == 2
        for row in rows:
            assert set(row["peak_memory"]) >= ARMS
            assert set(row["peak_memory"].values()) == {PEAK}
        # Every timed call waits for the device.
        runs = sum(time["runs"] for row in rows for time in row["times"].values())
        assert calls["synchronize"] > runs and calls["reset"] > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_no_device_is_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        tree.main(["--device", "cuda"])
    assert "torch finds no CUDA driver or no device" in capsys.readouterr().err
