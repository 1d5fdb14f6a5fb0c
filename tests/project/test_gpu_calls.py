# SPDX-License-Identifier: BSD-3-Clause
"""The stages of scripts/gpu_check.sh: their limits, their files, and the table in
docs/cuda_kernel.md that says what each of them shows."""

import ast
import re
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from test_gpu_check_script import ROOT, load

CALLS = load(ROOT / "scripts/gpu_calls.py").CALLS
PAGE = ROOT / "docs/cuda_kernel.md"
HEADING = "## What a GPU still has to show\n"
STAGES = {(name, stage.name): stage for name, call in CALLS.items() for s in call for stage in s}
# "A `smoke`: `test_kernel`, `test_append`", the names of tests if any.
SHOWN_BY = re.compile(r"([A-D]) `(\w+)`(?:: (`test_\w+`(?:, `test_\w+`)*))?")
RESULT = re.compile(r"`([A-D])\.(?:json|logs\.tar\.gz)`|`(decode_cuda(?:_quick)?|tune_cuda)\.json`")
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


def rows() -> list[list[str]]:
    """What is to be shown, what shows it, and where the answer is."""
    section = PAGE.read_text().split(HEADING)[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    return [line.strip("| ").split(" | ") for line in lines[2:]]


def shown_by() -> list[tuple[str, str, list[str]]]:
    """Call, stage and tests of every row that a call shows."""
    found = [match for row in rows() for match in SHOWN_BY.findall(row[1])]
    return [(call, stage, re.findall(r"test_\w+", tests)) for call, stage, tests in found]


def test_every_row_names_a_stage_or_says_that_there_is_none() -> None:
    for row in rows():
        assert len(row) == 3, row
        calls = {call for call, _, _ in SHOWN_BY.findall(row[1])}
        assert calls or row[1].startswith("no call: "), row
        results = RESULT.findall(row[2])
        assert bool(results) == bool(calls), row
        assert {call for call, _ in results if call} <= calls, row


def test_the_table_names_every_stage_and_no_other() -> None:
    named = {(call, stage) for call, stage, _ in shown_by()}
    assert named <= set(STAGES)
    assert {stage for _, stage in named} == {stage for _, stage in STAGES}


def gpu_only() -> set[str]:
    """Tests of which a case is marked `gpu`, and that no fixture runs with emulated kernels."""
    return {
        f.name for path in modules() for f in functions(path)
        if any("mark.gpu(" in ast.unparse(decorator) for decorator in f.decorator_list)
        and not {"device", "cuda_kernels"} & {a.arg for a in f.args.args}
    }  # fmt: skip


def test_the_table_names_every_test_that_no_dry_run_shows() -> None:
    named = {name for _, _, tests in shown_by() for name in tests}
    assert len(gpu_only()) > 10
    assert gpu_only() <= named, gpu_only() - named


class Words(dict[str, bool]):
    """Names of an expression of pytest's -k: true where the text has them."""

    def __init__(self, text: str) -> None:
        self.text = text.lower()

    def __missing__(self, word: str) -> bool:
        return word.lower() in self.text


def is_run(stage: tuple[str, ...], test: str) -> bool:
    words = stage[stage.index("-k") + 1] if "-k" in stage else "True"
    return any(
        test in {f.name for f in functions(ROOT / file)}
        and eval(words, {}, Words(f"{Path(file).name} {test} cuda"))
        for file in stage
        if file.startswith("tests/")
    )


@pytest.mark.parametrize("call, stage, tests", shown_by())
def test_stages_run_the_tests_that_the_table_names(call: str, stage: str, tests: list[str]) -> None:
    command = STAGES[call, stage].command
    assert [test for test in tests if not is_run(command, test)] == []
