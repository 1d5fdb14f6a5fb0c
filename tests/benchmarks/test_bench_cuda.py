# SPDX-License-Identifier: BSD-3-Clause
"""The CUDA benchmark without a GPU: its report from runs on the CPU, and its refusals."""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.progress import Progress
from torch import Tensor

pytest.importorskip("triton")

from bench_problems import measure_on_cpu
from benchmarks import cuda
from benchmarks import decode as program
from benchmarks.cuda import cases as shapes
from benchmarks.cuda import (
    decode,
    machine,
    merge,
    peers,
    predict,
    read_probe,
    tables,
    targets,
    timing,
)
from benchmarks.cuda.cases import CudaCase
from benchmarks.cuda.rows import PROBE
from benchmarks.harness import measure, report

HEADS: dict[str, Any] = {"heads": (4, 2), "head_dim": 64}
ONE_LONG = CudaCase(shapes.RAGGED, lengths=(8,) * 3 + (500,), layout="packed", **HEADS)
CASES: list[decode.AnyCase] = [
    CudaCase(lengths=(64,), **HEADS),
    ONE_LONG,
    shapes.uniform_twin(ONE_LONG),
    CudaCase(shapes.CAPACITY, lengths=(30, 30), capacity=300, layout="NHD", **HEADS),
    CudaCase(shapes.QUERIES, dtype="fp32", lengths=(70,) * 2, seqlen_q=4, **HEADS),
    CudaCase(shapes.PAGES, lengths=(70, 50), page_size=16, **HEADS),
    CudaCase(shapes.EIGHT_BITS, kv_dtype="int8", lengths=(70, 50), page_size=16, **HEADS),
    CudaCase(shapes.LATENT, heads=(4, 1), head_dim=72, latent_dim=64, lengths=(70,)),
    merge.MergeCase(3, 1),
]


def test_without_a_gpu_it_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert program.main(["--device", "cuda", "--quick"]) == 2
    output = capsys.readouterr().out
    assert "decode.py --device cuda: torch finds no CUDA driver or no device" in output


def test_without_cuda_kernels_it_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(cuda, "has_cuda_kernel", lambda op: False)
    assert program.main(["--device", "cuda"]) == 2
    assert "the extension has no lean_decode for CUDA" in capsys.readouterr().out
    monkeypatch.setattr(cuda.importlib.util, "find_spec", lambda name: None)
    assert program.main(["--device", "cuda"]) == 2
    assert "it needs triton, which is not installed" in capsys.readouterr().out


def test_kernels_are_found_by_dispatch_key() -> None:
    assert not cuda.has_cuda_kernel("no_such_operator")
    assert not cuda.has_cuda_kernel("lean_schedule")  # there is, but not for CUDA


@pytest.mark.parametrize("cases", [decode.quick_cases, decode.standard_cases, decode.full_cases])
def test_every_list_merges_states_after_the_quick_cases(cases: Callable[[], Any]) -> None:
    names = [case.name for case in cases()]
    quick = [case.name for case in decode.quick_cases()]
    assert len(set(names)) == len(names) and names[: len(quick)] == quick
    assert {case.name for case in merge.CASES} < set(names)


@pytest.fixture
def cpu_as_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything but kernels, streams and graphs is the CUDA benchmark's own."""
    properties = SimpleNamespace(
        name="CPU", L2_cache_size=1 << 16, multi_processor_count=4, major=0, minor=0,
        total_memory=1 << 34,
    )  # fmt: skip
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (decode.SPARE_BYTES + (1 << 26),) * 2)
    monkeypatch.setattr(
        decode, "InputArena", lambda num_bytes, device: measure.InputArena(num_bytes)
    )
    monkeypatch.setattr(machine, "CEILING_BYTES", 1 << 20)
    monkeypatch.setattr(peers.ablations, "load", lambda: False)
    monkeypatch.setattr(timing, "measure", measure_on_cpu)
    monkeypatch.setattr(read_probe, "sums", lambda data, configuration: data.sum())


def run(cases: Sequence[decode.AnyCase], **options: Any) -> report.Report:
    with Progress(disable=True) as progress:
        return decode.run(cases, progress, seconds=0.1, **options)


def test_report_is_right_and_written(cpu_as_gpu: None, tmp_path: Path) -> None:
    result = run(CASES)
    assert not result.wrong
    paths = report.write(result, tmp_path)
    assert [path.name for path in paths] == ["decode_cuda.md", "decode_cuda.json"]
    content = json.loads(paths[1].read_text())
    told = {"commit", "torch", "triton", "gpu", "gpu state before", "gpu state after", "cuda"}
    assert told | {"read ceiling", "device copy", "cudnn"} <= set(content["environment"])
    names = [case.name for case in CASES]
    assert [row["name"] for row in content["rows"]] == names
    for row in content["rows"]:
        assert row["times"]["lean_decode"]["median_us"] > 0 and row["eager"]["lean_decode"]
        assert row["read_share"] > 0 and row["times"][PROBE]
        assert row["accuracy"]["lean_decode"]["o_error"] < 0.1
        assert row["name"] in paths[0].read_text()
    # What this machine cannot run is listed with its reason, in every row.
    assert all("torch flash" in row["unavailable"] for row in content["rows"][:-1])
    assert content["rows"][0]["unavailable"]["equal splits"] == (
        "not built: python -m benchmarks.cuda.ablations"
    )
    assert [target["name"] for target in content["targets"]]
    assert "MISSED" in paths[0].read_text() or "met" in paths[0].read_text()


def test_wrong_result_is_wrong(cpu_as_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    right = peers.lean_decode

    def last_row_wrong(*inputs: Any, **options: Any) -> tuple[Tensor, Tensor]:
        o, lse = right(*inputs, **options)
        o[-1, -1, -1, -1] += 1
        return o, lse

    monkeypatch.setattr(peers, "lean_decode", last_row_wrong)
    result = run(CASES[:2])
    assert result.wrong == [case.name for case in CASES[:2]]
    assert "WRONG" in report.markdown(result)


def test_wrong_peer_is_no_peer(cpu_as_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def zeros(case: CudaCase, inputs: Any) -> Callable[[int], Tensor]:
        return lambda i: torch.zeros_like(inputs.q)

    monkeypatch.setattr(peers, "flash", zeros)
    monkeypatch.setattr(peers, "cudnn", lambda case, inputs: lambda i: inputs.q * math.nan)
    result = run(CASES[:1])
    row = result.rows[0]
    assert not result.wrong
    assert row["unavailable"]["torch flash"].startswith("wrong result")
    assert row["unavailable"]["cuDNN"] == "wrong result (error nan)"
    assert "torch flash" not in row["times"]
    note = f"n/a: cuDNN (wrong result (error nan)): 1 of 1 rows, the first is {CASES[0].name}"
    assert note in result.notes


def test_what_does_not_fit_is_left_out(cpu_as_gpu: None) -> None:
    large = CudaCase(lengths=(1 << 20,))
    result = run([large, CASES[0]])
    assert [row["name"] for row in result.rows] == [CASES[0].name]
    assert any(f"left out: {large.name}: needs 4 GB" in text for text in result.warnings)


@pytest.mark.parametrize("where", ["inputs", "operator"])
def test_out_of_memory_is_left_out(
    where: str, cpu_as_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*arguments: Any, **options: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    if where == "inputs":
        monkeypatch.setattr(decode, "Inputs", no_memory)
    else:
        monkeypatch.setattr(peers, "lean_decode", no_memory)
    result = run(CASES[:1])
    assert f"left out: {CASES[0].name}: out of memory" in result.warnings
    assert not result.wrong


def test_no_case_begins_after_the_budget(cpu_as_gpu: None) -> None:
    result = run(CASES[:2], budget=0.0)
    assert result.rows == []
    assert sum("the time was up" in text for text in result.warnings) == 2
    assert all(target.met is None for target in targets.evaluate(result.rows))


def test_rows_are_kept_where_a_kernel_hangs(
    cpu_as_gpu: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    measured = decode.case_row

    def hang(case: CudaCase, *arguments: Any) -> dict[str, Any]:
        if case == CASES[2]:
            raise KeyboardInterrupt
        return measured(case, *arguments)

    monkeypatch.setattr(cuda, "unavailable", lambda: None)
    monkeypatch.setattr(decode, "case_row", hang)
    monkeypatch.setattr(decode, "standard_cases", lambda: CASES)
    with pytest.raises(KeyboardInterrupt):
        program.main(["--device", "cuda", "--out", str(tmp_path)])
    rows = json.loads((tmp_path / "decode_cuda.json").read_text())["rows"]
    assert [row["name"] for row in rows] == [case.name for case in CASES[:2]]


@pytest.mark.parametrize("lost", [True, False])
def test_a_failing_operator_is_wrong(
    lost: bool, cpu_as_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(case: CudaCase, *arguments: Any) -> None:
        raise RuntimeError("cuDNN: an illegal memory access")

    def wait() -> None:
        if lost:
            raise RuntimeError("an illegal memory access")

    monkeypatch.setattr(decode, "case_row", fail)
    monkeypatch.setattr(torch.cuda, "synchronize", wait)
    result = run(CASES[:2])
    assert result.wrong == [case.name for case in CASES[: 1 if lost else 2]]
    assert "cuDNN: an illegal memory access" in tables.line(result.rows[0])
    assert any("the device is lost" in text for text in result.warnings) == lost


def test_an_operator_that_raises_is_wrong(
    cpu_as_gpu: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(*inputs: Any, **options: Any) -> None:
        raise RuntimeError("lean_decode: no kernel for this head_dim")

    monkeypatch.setattr(peers, "lean_decode", refuse)
    result = run(CASES)
    assert result.wrong == [case.name for case in CASES[:-1]]
    assert tables.line(result.rows[0]).endswith(
        "WRONG RuntimeError: lean_decode: no kernel for this head_dim"
    )
    report.write(result, tmp_path)


@pytest.mark.parametrize("right", [True, False])
def test_command(
    right: bool, cpu_as_gpu: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(cuda, "unavailable", lambda: None)
    monkeypatch.setattr(decode, "quick_cases", lambda: CASES)
    if not right:
        monkeypatch.setattr(peers, "lean_decode", lambda q, *others, **options: (q * 2, q[..., 0]))
    arguments = ["--device", "cuda", "--quick", "--only", "of 300"]
    status = program.main([*arguments, "--out", str(tmp_path)])
    output = capsys.readouterr().out
    assert status == (0 if right else 1)
    assert ("WRONG results: " + CASES[3].name in output) != right
    assert "not measured: <= 6.5 us" in output
    rows = json.loads((tmp_path / "decode_cuda_quick.json").read_text())["rows"]
    assert [row["name"] for row in rows] == [CASES[3].name]
    page = predict.table_of_report(tmp_path / "decode_cuda_quick.md", predict.SHOWN["peers"][1])
    assert f"| {CASES[3].name} |" in page and page.count("\n") == 3
    assert {*predict.measured(tmp_path)} == ({CASES[3].name} if right else set())


def test_merge_formula_of_pytorch_is_the_operators() -> None:
    from tree_attention import merge_states

    o, lse = torch.randn(5, 7, 16), torch.randn(5, 7)
    for x, y in zip(merge_states(o, lse), merge.pytorch_merge(o, lse), strict=True):
        torch.testing.assert_close(x, y)


def test_gpu_state_without_nvidia_smi(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    assert str(machine.state()).startswith("nvidia-smi: ")


def test_reason_is_the_first_error() -> None:
    try:
        try:
            raise ValueError("this is why\nand more")
        except ValueError:
            raise RuntimeError("a capture failed") from None
    except RuntimeError as error:
        assert timing.reason(error) == "ValueError: this is why"
