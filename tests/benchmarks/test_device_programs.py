# SPDX-License-Identifier: BSD-3-Clause
"""tree.py, memory.py and shares.py with --device cuda, over a device that is not there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from rich.progress import Progress

from benchmarks import memory, tree
from benchmarks.harness import measure
from benchmarks.harness.ranks import Ranks
from benchmarks.papers import shares
from distributed import run_ranks
from fake_device import fake_cuda

CUDA = torch.device("cuda", 0)
PEAK = 12_345
ARMS = {"all_gather", "three_allreduce", tree.RING, tree.AUTO}


def no_gradient(mode: bool = True) -> AbstractContextManager[None]:
    return torch.no_grad() if mode else nullcontext()


@contextmanager
def device_that_counts() -> Iterator[dict[str, int]]:
    """Its allocator has given out so many bytes at most since the peak was forgotten."""
    calls = {"synchronize": 0, "reset": 0}

    def count(name: str) -> None:
        calls[name] += 1

    with (
        fake_cuda(),
        # Views of its tensors cannot be made in inference mode.
        mock.patch.object(torch, "inference_mode", no_gradient),
        mock.patch.multiple(
            torch.cuda,
            synchronize=lambda *_: count("synchronize"),
            reset_peak_memory_stats=lambda *_: count("reset"),
            memory_allocated=lambda *_: 1000,
            max_memory_allocated=lambda *_: 1000 + PEAK,
        ),
    ):
        yield calls


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


def memory_on_a_device(rank: int, world_size: int) -> list[dict[str, Any]]:
    with device_that_counts(), torch.no_grad():
        return memory.measure([64], (4, 2), Ranks(), CUDA)


def test_memory_program() -> None:
    for (row,) in run_ranks(memory_on_a_device, 2, fresh=True):
        assert list(row["methods"]) == list(memory.METHODS)
        for method in row["methods"].values():
            assert method == {"allocated": PEAK, "resident": PEAK, "right": True}


def test_shares_program() -> None:
    width = {"hidden_size": 64, "word_embed_proj_dim": 64, "num_attention_heads": 4}
    with torch.no_grad():
        model = shares.make_model("1.3b", 1, 256, vocab_size=97, ffn_dim=64, **width)
        with device_that_counts():
            times = shares.measure(model.to("cuda"), 32, 4, rounds=1)
    assert {name: len(gaps) for name, (_, gaps) in times.items()} == {
        shares.OURS: 3,
        shares.THEIRS: 3,
    }


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
@pytest.mark.parametrize("program", [tree, memory, shares])
def test_no_device_is_a_sentence(program: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        program.main(["--device", "cuda"])
    assert "torch finds no CUDA driver or no device" in capsys.readouterr().err
