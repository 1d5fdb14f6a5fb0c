# SPDX-License-Identifier: BSD-3-Clause
"""The sweep of tiles and workers of a GPU, with tiny cases and without one."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench_problems import measure_on_cpu
from benchmarks.cuda import tune
from benchmarks.harness import measure


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The program's own parts of CUDA, over the CPU's operators and its clock."""
    pytest.importorskip("triton")
    from benchmarks.cuda import ablations, machine, read_probe, timing

    properties = SimpleNamespace(
        L2_cache_size=1 << 16, multi_processor_count=4, shared_memory_per_multiprocessor=228 << 10
    )
    monkeypatch.setattr(measure, "last_level_cache_bytes", lambda: 1 << 20)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(tune.cuda, "unavailable", lambda: None)
    monkeypatch.setattr(ablations, "load", lambda: True)
    monkeypatch.setattr(tune, "InputArena", lambda n, device: measure.InputArena(n))
    monkeypatch.setattr(machine, "environment", lambda: {"gpu": "none"})
    monkeypatch.setattr(read_probe, "sums", lambda data, configuration: data.sum())

    monkeypatch.setattr(timing, "measure", measure_on_cpu)


def operator(tile: int, stages: int, *, wrong: bool = False) -> Any:
    if (tile, stages) == (256, 4):
        raise RuntimeError("too large")
    op = torch.ops.tree_attention.lean_decode
    if not (wrong and tile == 64 and stages == 2):
        return op
    return lambda *args, **options: tuple(x + 1 for x in op(*args, **options))


@pytest.mark.parametrize("wrong", [False, True])
def test_program_on_a_gpu(
    gpu: None, wrong: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from benchmarks.cuda import ablations

    monkeypatch.setattr(ablations, "operator", lambda *x: operator(*x, wrong=wrong))
    options = ["--quick", "--seconds", "0.01", "--out", str(tmp_path)]
    assert tune.main(options) == wrong
    content = json.loads((tmp_path / "tune_cuda.json").read_text())
    assert "gpu: none" in (tmp_path / "tune_cuda.md").read_text()
    for row in content["rows"]:
        assert row["wrong"] == (["64 keys, 2 stages"] if wrong else [])
        assert row["failed"] == {"256 keys, 4 stages": "RuntimeError: too large"}
        assert {"4 workers", "16 workers", "256 keys, 3 stages"} < row["ratios"].keys()
        assert row["read_share"] > 0


def test_cases_after_the_budget_are_left_out(
    gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from benchmarks.cuda import ablations

    monkeypatch.setattr(ablations, "operator", operator)
    now = iter([0.0, 0.0, 5.0])
    monkeypatch.setattr(tune, "time", SimpleNamespace(monotonic=lambda: next(now)))
    assert tune.main(["--quick", "--seconds", "0.01", "--budget", "4"]) == 0
    assert "left out, the time was up: bf16 4/2 d128" in capsys.readouterr().out


def test_without_a_gpu_it_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tune.cuda, "unavailable", lambda: "no device")
    assert tune.main([]) == 2
    assert "tune: no device" in capsys.readouterr().out
    monkeypatch.setattr(tune.cuda, "unavailable", lambda: None)
    monkeypatch.setattr(tune.ablations, "load", lambda: False)
    assert tune.main([]) == 2
    assert "the tiles are not built: python -m benchmarks.cuda.ablations" in capsys.readouterr().out
