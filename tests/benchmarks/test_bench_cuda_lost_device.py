# SPDX-License-Identifier: BSD-3-Clause
"""Who loses the device, without one: what each process says, and the table of all."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from benchmarks.cuda import lost_device, machine, peers, predict, timing
from benchmarks.cuda.cases import OURS
from benchmarks.harness.measure import InputArena


@pytest.fixture
def cpu_as_gpu(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Returns the names of those that lose the device, to which more may be added."""
    lost: list[str] = []

    def check(name: str) -> None:
        if name in lost:
            raise timing.DeviceLost(f"{name} lost the device: an illegal instruction")

    monkeypatch.setattr(lost_device.cuda, "unavailable", lambda: None)
    monkeypatch.setattr(lost_device, "SEQUENCES", 3)
    monkeypatch.setattr(lost_device, "LENGTHS", (8, 16))
    monkeypatch.setattr(lost_device, "InputArena", lambda n, device: InputArena(n))
    monkeypatch.setattr(lost_device, "check_device", check)
    monkeypatch.setattr(machine, "environment", lambda: {"gpu": "none"})
    return lost


def said(capsys: pytest.CaptureFixture[str], name: str) -> str:
    assert lost_device.main(["--one", name, "8"]) == 0
    return capsys.readouterr().out.strip()


def test_one_call(
    cpu_as_gpu: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert said(capsys, OURS) == "right"
    assert said(capsys, lost_device.FLASH_3) == "not given"
    assert said(capsys, peers.CUDNN).startswith("cannot run it: ")
    monkeypatch.setattr(peers, "flash", lambda case, inputs: lambda i: inputs.q)
    assert said(capsys, peers.FLASH) == "WRONG"
    cpu_as_gpu.append(OURS)
    assert said(capsys, OURS) == f"DeviceLost: {OURS} lost the device: an illegal instruction"


PROGRAM = """
import sys, time
name, length = sys.argv[2:4]
if name == "cuDNN": print("some words"); print("DeviceLost: cuDNN lost the device"); sys.exit(134)
if name == "FlashAttention-3": print(*sys.argv[4:], file=sys.stderr); sys.exit(3)
if name == "torch flash": time.sleep(60)
print("right" if length == "8" or "RIGHT" in sys.argv[0] else "WRONG")
"""


@pytest.mark.parametrize("right", [True, False])
def test_all_in_processes(
    right: bool, cpu_as_gpu: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / ("RIGHT.py" if right else "program.py")
    program.write_text(PROGRAM)
    monkeypatch.setattr(lost_device, "COMMAND", (sys.executable, str(program)))
    monkeypatch.setattr(lost_device, "SECONDS", 3)
    options: list[Any] = ["--peers", "fa3.so", "--out", str(tmp_path)]
    assert lost_device.main(options) == (not right)
    rows = json.loads((tmp_path / "lost_device_cuda.json").read_text())["rows"]
    assert [row["key_bytes"] for row in rows] == [3 * n * 8 * 128 * 2 for n in (8, 16)]
    assert rows[0]["results"] == {
        OURS: "right",
        "cuDNN": "DeviceLost: cuDNN lost the device",
        "torch flash": "out of time",
        "FlashAttention-3": "exit status 3: --peers fa3.so",
    }
    assert [row["wrong"] for row in rows] == [False, not right]
    page = predict.table_of_report(tmp_path / "lost_device_cuda.md", ())
    assert page.count("\n") == 2 + len(rows) and "| DeviceLost: cuDNN lost the device |" in page


def test_lengths_are_around_two_gigabytes() -> None:
    sizes = [lost_device.case_of(n).read_bytes // 2 for n in lost_device.LENGTHS]
    assert sizes[0] == 1 << 31 < sizes[1] < sizes[2]


def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert lost_device.main([]) == 2
    assert "lost_device: torch finds no CUDA driver" in capsys.readouterr().out
