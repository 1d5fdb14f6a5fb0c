# SPDX-License-Identifier: BSD-3-Clause
"""The stages of scripts/gpu_check.sh: their limits and their files."""

import ast
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from test_gpu_check_script import ROOT, load

CALLS = load(ROOT / "scripts/gpu_calls.py").CALLS
STAGES = {(name, stage.name): stage for name, call in CALLS.items() for s in call for stage in s}
GPU_FIXTURES = {"device", "cuda", "cuda_kernels", "huge", "nccl"}


@cache
def functions(path: Path) -> list[ast.FunctionDef]:
    return [x for x in ast.parse(path.read_text()).body if isinstance(x, ast.FunctionDef)]


def modules() -> list[Path]:
    return sorted((ROOT / "tests").rglob("test_*.py"))


def gpu_files() -> set[str]:
    return {
        str(path.relative_to(ROOT))
        for path in modules()
        if any(GPU_FIXTURES & {a.arg for a in f.args.args} for f in functions(path))
    }


@pytest.mark.parametrize("call", CALLS)
def test_a_stage_needs_earlier_ones(call: str) -> None:
    names = {"a GPU"}
    for step in CALLS[call]:
        for stage in step:
            assert set(stage.needs) <= names, stage
        names |= {stage.name for stage in step}


def test_a_call_ends_within_ten_minutes() -> None:
    """With what ends and is killed beside its own time, and the archive of the logs."""
    script = load(ROOT / "scripts/gpu_check.py")
    assert script.SECONDS + 2 * script.GRACE < 600


def test_every_file_of_gpu_tests_is_in_one_stage() -> None:
    """But for those of the gate, and of graphs, which three stages share."""
    run = Counter(
        word for (_, name), stage in STAGES.items()
        if name != "gate" for word in stage.command if word.startswith("tests/")
    )  # fmt: skip
    run["tests/cuda/test_cuda_graphs.py"] -= 2
    elsewhere = {"tests/project/test_packaging.py"}  # without a GPU
    assert run == dict.fromkeys(gpu_files() - elsewhere, 1)


# One runs a program that it compiles for the GPU, the other asks the profiler.
NEVER_DRY = {"tests/cuda/test_cuda_ptx.py", "tests/cuda/test_cuda_ranges.py"}


def test_no_file_is_first_run_on_a_gpu() -> None:
    """Some test of each takes a device, and is not marked as one that only a GPU can run."""
    only_there = {
        file for file in gpu_files()
        if all(
            any(ast.unparse(x).startswith("pytest.mark.gpu(") for x in f.decorator_list)
            for f in functions(ROOT / file)
            if f.name.startswith("test_") and GPU_FIXTURES & {a.arg for a in f.args.args}
        )
    }  # fmt: skip
    assert only_there == NEVER_DRY


def test_peers_are_timed_in_every_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEERS", "one.so two.so")
    monkeypatch.setitem(sys.modules, "gpu_calls", None)  # as it was, after the test
    calls = load(ROOT / "scripts/gpu_calls.py").CALLS
    commands = [s.command for call in calls.values() for step in call for s in step]
    decode = [command for command in commands if "benchmarks/decode.py" in command]
    assert len(decode) == 3
    assert all("--peers one.so two.so" in " ".join(command) for command in decode)
