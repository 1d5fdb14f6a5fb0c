# SPDX-License-Identifier: BSD-3-Clause
"""The sweep of tiles and workers, with tiny cases: the CPU's tiles, and the GPU's without one."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import emulated
from benchmarks import tune
from benchmarks.cpu import tiles
from benchmarks.cpu import tune as cpu_tune
from benchmarks.harness import measure, tuning
from helpers import assert_same_bits
from tree_attention import _C


@pytest.fixture(scope="module")
def portable_tiles() -> Iterator[None]:
    """The operators over the portable kernels, which compile in seconds; the extension's, too."""
    names = ["tests/benchmarks/portable_kernels.cpp", "benchmarks/cpu/tiles/tiles.cpp"]
    names += [
        name
        for name in tiles.PRODUCT_SOURCES
        if "instruction_set" not in name
        and not name.endswith(("amx.cpp", "avx2.cpp", "avx512.cpp"))
    ]
    objects = emulated.COMPILER.compile([Path(name) for name in names])
    libraries = [f"-L{emulated.TORCH}/lib", "-ltorch_cpu", "-lc10"]
    library = emulated.COMPILER.link("tiles.so", objects, ["-shared", *libraries])
    torch.ops.load_library(library)
    before = _C.cpu_instruction_set()
    _C.set_cpu_instruction_set("portable")
    yield
    _C.set_cpu_instruction_set(before)


@pytest.fixture(autouse=True)
def small_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "last_level_cache_bytes", lambda: 1 << 20)
    monkeypatch.setattr(cpu_tune, "pin_threads", list)
    monkeypatch.setattr(tiles, "load", lambda: None)


def call(op: Any, workers: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 4, 1, 64, generator=generator)
    k, v = torch.randn(2, 1, 2, 700, 64, generator=generator)
    return op(q, k, v, num_workers=workers)


@pytest.mark.parametrize("workers", [0, 3])
def test_own_tiles_have_the_bits_of_the_extension(portable_tiles: None, workers: int) -> None:
    ours = call(torch.ops.tree_attention.lean_decode, workers)
    assert_same_bits(ours, call(tiles.operator(tiles.OWN), workers))


def test_tiles_cut_elsewhere(portable_tiles: None) -> None:
    """700 keys of two heads are two tiles of 1,024, so that three workers are two."""
    whole = call(tiles.operator(1024), 1)
    assert_same_bits(whole, call(tiles.operator(1024), 3))
    assert not torch.equal(whole[0], call(tiles.operator(32), 3)[0])


def test_program_on_the_cpu(portable_tiles: None, tmp_path: Path) -> None:
    assert tune.main(["--quick", "--seconds", "0.01", "--out", str(tmp_path)]) == 0
    content = json.loads((tmp_path / "tune.json").read_text())
    assert [row["wrong"] for row in content["rows"]] == [[], []]
    row = content["rows"][0]
    numbers = len({variant["workers"] for variant in row["variants"].values()})
    assert len(row["ratios"]) == 1 + len(tiles.TILES) * numbers and numbers == len(cpu_tune.WORKERS)
    assert row["ratios"]["lean_decode"] == 1 and row["ratios"][row["best"]] <= 1
    text = (tmp_path / "tune.md").read_text()
    assert "paper's tile" in text and "threads: " in text
    assert (tmp_path / "tune.png").read_bytes()[:4] == b"\x89PNG"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The program's own parts of CUDA, over the CPU's operators and its clock."""
    pytest.importorskip("triton")
    from benchmarks.cuda import ablations, machine, read_probe, timing
    from benchmarks.cuda import tune as cuda_tune

    properties = SimpleNamespace(
        L2_cache_size=1 << 16, multi_processor_count=4, shared_memory_per_multiprocessor=228 << 10
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(tune.cuda, "unavailable", lambda: None)
    monkeypatch.setattr(ablations, "load", lambda: True)
    monkeypatch.setattr(cuda_tune, "InputArena", lambda n, device: measure.InputArena(n))
    monkeypatch.setattr(machine, "environment", lambda: {"gpu": "none"})
    monkeypatch.setattr(read_probe, "sums", lambda data, configuration: data.sum())

    def timed(calls: Mapping[str, Any], sets: int, seconds: float) -> timing.Measurement:
        found = timing.Measurement()
        for name, function in calls.items():
            try:
                samples = measure.time_alternating({name: function}, num_sets=sets)[name]
            except RuntimeError as error:
                found.failed[name] = timing.reason(error)
                continue
            found.measured[name] = timing.Measured(samples, samples)
        return found

    monkeypatch.setattr(timing, "measure", timed)


def operator(tile: int, stages: int, *, wrong: bool = False) -> Any:
    if (tile, stages) == (256, 4):
        raise RuntimeError("too large")
    op = torch.ops.tree_attention.lean_decode
    if not (wrong and tile == 64 and stages == 2):
        return op
    return lambda *args, **options: [x + 1 for x in op(*args, **options)]


@pytest.mark.parametrize("wrong", [False, True])
def test_program_on_a_gpu(
    gpu: None, wrong: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from benchmarks.cuda import ablations

    monkeypatch.setattr(ablations, "operator", lambda *x: operator(*x, wrong=wrong))
    options = ["--quick", "--seconds", "0.01", "--out", str(tmp_path)]
    assert tune.main(["--device", "cuda", *options]) == wrong
    content = json.loads((tmp_path / "tune_cuda.json").read_text())
    assert content["environment"]["gpu"] == "none"
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
    monkeypatch.setattr(tuning, "time", SimpleNamespace(monotonic=lambda: next(now)))
    assert tune.main(["--device", "cuda", "--quick", "--seconds", "0.01", "--budget", "4"]) == 0
    assert "left out, the time was up: bf16 4/2 d128" in capsys.readouterr().out


def test_without_a_gpu_it_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tune.cuda, "unavailable", lambda: "no device")
    assert tune.main(["--device", "cuda"]) == 2
    assert "tune --device cuda: no device" in capsys.readouterr().out
    monkeypatch.setattr(tune.cuda, "unavailable", lambda: None)
    monkeypatch.setattr(tune.ablations, "load", lambda: False)
    assert tune.main(["--device", "cuda"]) == 2
    assert "the tiles are not built: python -m benchmarks.cuda.ablations" in capsys.readouterr().out
