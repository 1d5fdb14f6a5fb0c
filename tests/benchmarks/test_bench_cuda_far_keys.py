# SPDX-License-Identifier: BSD-3-Clause
"""A dry run of the benchmark of far keys, on a fake device."""

import json
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("transformers")

import fake_device
from benchmarks.cuda import far_keys, machine
from fake_device import fake_cuda

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is imitated")

SIZES = far_keys.Sizes(far=6000, near=300, layers=2, hidden=32, heads=4, heads_kv=2, head_dim=16)


class Stream(fake_device.Stream):
    """What one stream copies to the host, another one that waits for it may copy back."""

    def wait_stream(self, _: fake_device.Stream) -> None:
        fake_device.Event().synchronize()

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: object) -> None:
        pass


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def all_copies_come() -> None:
        fake_device.Event().synchronize()

    monkeypatch.setattr(far_keys.cuda, "unavailable", lambda: None)
    monkeypatch.setattr(far_keys, "Sizes", lambda: SIZES)
    monkeypatch.setattr(far_keys, "CHUNK", 512)
    monkeypatch.setattr(far_keys, "SECONDS", 0.0)
    monkeypatch.setattr(machine, "environment", lambda: {"gpu": "none"})
    # The fake device cannot slice inference tensors.
    monkeypatch.setattr(torch, "inference_mode", lambda mode=True: nullcontext())
    monkeypatch.setattr(torch, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "default_stream", Stream)
    monkeypatch.setattr(torch.cuda, "synchronize", all_copies_come)
    with fake_cuda():
        yield


@pytest.mark.usefixtures("no_gpu")
def test_a_dry_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert far_keys.main(["--out", str(tmp_path)]) == 0
    written: Any = json.loads((tmp_path / "far_keys_cuda.json").read_text())
    (row,) = written["rows"]
    assert row["far tokens"] >= 2048 and row["far tokens"] % 1024 == 0  # whole pages
    assert row["difference of logits"] < far_keys.TOLERANCE
    assert set(row["times"]) == {"step", "GPU's part", "host's part", "offloaded cache"}
    printed = " ".join(capsys.readouterr().out.split())
    assert "At most 1.1 of the longer part: m" in printed
    assert "At least 2 times as fast as the offloaded cache: m" in printed


@pytest.mark.usefixtures("no_gpu")
def test_keys_that_are_lost_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tree_attention.hf.attention._parts_on_host", lambda *_: [])
    assert far_keys.main([]) == 1


def test_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert far_keys.main([]) == 2
    assert capsys.readouterr().out.startswith("far_keys: ")
