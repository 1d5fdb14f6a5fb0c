# SPDX-License-Identifier: BSD-3-Clause
"""The stages of scripts/gpu_check.sh: their limits, their files, and the table in
docs/cuda_kernel.md that says what each of them shows."""

import ast
import importlib.util
import re
import sys
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from _pytest.mark.expression import Expression

ROOT = Path(__file__).parents[2]


def load(path: Path) -> Any:
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


STEPS = load(ROOT / "scripts/gpu_stages.py").STAGES
PAGE = ROOT / "docs/cuda_kernel.md"
HEADING = "## What a GPU still has to show\n"
STAGES = {stage.name: stage for step in STEPS for stage in step}
# "`smoke`: `test_kernel`, `test_append`; `gate`", the names of tests if any.
SHOWN_BY = re.compile(r"`(\w+)`(?:: (`test_\w+`(?:, `test_\w+`)*))?(?:; |$)")
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


def test_a_stage_needs_earlier_ones() -> None:
    names = {"a GPU"}
    for step in STEPS:
        for stage in step:
            assert set(stage.needs) <= names, stage
        assert not names & {stage.name for stage in step}
        names |= {stage.name for stage in step}


def test_a_call_ends_within_ten_minutes() -> None:
    """With what ends and is killed beside its own time, and the archive of the logs."""
    script = load(ROOT / "scripts/gpu_check.py")
    assert script.SECONDS + 2 * script.GRACE < 600


def test_every_file_of_gpu_tests_is_in_one_stage() -> None:
    """But for those of the gate and of what was mended, and of graphs, which three stages share."""
    run = Counter(
        word for name, stage in STAGES.items()
        if name not in ("gate", "mended") for word in stage.command if word.startswith("tests/")
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


def test_peers_are_in_every_program_that_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEERS", "one.so two.so")
    monkeypatch.setitem(sys.modules, "gpu_stages", None)  # as it was, after the test
    steps = load(ROOT / "scripts/gpu_stages.py").STAGES
    with_peers = {
        x.name for s in steps for x in s if "--peers one.so two.so" in " ".join(x.command)
    }
    assert with_peers == {"peers", "benchmark", "all_rows", "lost_device"}


def rows() -> list[list[str]]:
    """What is to be shown, what shows it, and where the answer is."""
    section = PAGE.read_text().split(HEADING)[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    return [line.strip("| ").split(" | ") for line in lines[2:]]


def shown_by() -> list[tuple[str, list[str]]]:
    """Stage and tests of every row that a stage shows."""
    found = [x for row in rows() if not by_hand(row) for x in SHOWN_BY.findall(row[1])]
    return [(stage, re.findall(r"test_\w+", tests)) for stage, tests in found]


def by_hand(row: list[str]) -> bool:
    return row[1].startswith("by hand: ")


def test_the_table_names_every_stage_and_no_other() -> None:
    for row in rows():
        assert len(row) == 3, row
        assert by_hand(row) or SHOWN_BY.sub("", row[1]) == "", row
    assert {stage for stage, _ in shown_by()} == STAGES.keys()


def gpu_only() -> set[str]:
    """Tests of which a case is marked `gpu`, and that no fixture runs with emulated kernels."""
    return {
        f.name for path in modules() for f in functions(path)
        if any("mark.gpu(" in ast.unparse(decorator) for decorator in f.decorator_list)
        and not {"device", "cuda_kernels"} & {a.arg for a in f.args.args}
    }  # fmt: skip


def test_the_table_names_every_test_that_no_dry_run_shows() -> None:
    named = {name for _, tests in shown_by() for name in tests}
    assert len(gpu_only()) > 10
    assert gpu_only() <= named, gpu_only() - named


def is_run(command: tuple[str, ...], test: str) -> bool:
    words = command[command.index("-k") + 1] if "-k" in command else "test"
    return any(
        test in {f.name for f in functions(ROOT / file)}
        and Expression.compile(words).evaluate(
            lambda word, file=file: word.lower() in f"{Path(file).name} {test} cuda".lower()
        )
        for file in command
        if file.startswith("tests/")
    )


@pytest.mark.parametrize("stage, tests", shown_by())
def test_stages_run_the_tests_that_the_table_names(stage: str, tests: list[str]) -> None:
    assert [test for test in tests if not is_run(STAGES[stage].command, test)] == []
