# SPDX-License-Identifier: BSD-3-Clause
"""scripts/gpu_check.sh without a GPU: its stages, time limit and results, with programs that stand
in for Python and compute-sanitizer."""

import json
import os
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STAGES = [
    "build",
    "machine",
    "smoke",
    "tests",
    "alone",
    "ranks",
    "ablations",
    "benchmark",
    "sanitizer",
]

PYTHON = """#!/bin/bash
echo "$*" >>"$(dirname "$0")/calls"
case "$*" in
  *get_device_name*) echo "A GPU|9.0" ;;
  *setup.py*) echo "built for $TORCH_CUDA_ARCH_LIST" ;;
  *"-k cuda"*) echo "REQUIRE_CUDA is $REQUIRE_CUDA"; echo '1 failed, "2" passed'; exit 1 ;;
  *test_cuda_smoke*) echo "51 passed" ;;
  *test_cuda_graphs*) sleep "${SLEEP:-0}" ;;
  *benchmarks/decode.py*) mkdir -p "${!#}"; touch "${!#}"/{a,b,c,d,e,f}.png ;;
esac
"""
SANITIZER = """#!/bin/bash
[[ $2 == "$FAILING_TOOL" ]] && status=99
echo "========= ERROR SUMMARY: ${status:-0} errors"
exit "${status:-0}"
"""


def add_program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.fixture
def check(tmp_path):
    """Runs the script in a folder that has as much of a checkout as it reads."""
    for name in ("gpu_check.sh", "sanitize_cuda.sh"):
        (tmp_path / "scripts").mkdir(exist_ok=True)
        shutil.copy(ROOT / "scripts" / name, tmp_path / "scripts" / name)
    (tmp_path / "tests/cuda").mkdir(parents=True)
    for path in ROOT.glob("tests/cuda/test_cuda_*.py"):
        (tmp_path / "tests/cuda" / path.name).touch()
    python = add_program(tmp_path / "python", PYTHON)
    add_program(tmp_path / "bin" / "compute-sanitizer", SANITIZER)

    def run(**variables: str):
        path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
        result = subprocess.run(
            [tmp_path / "scripts" / "gpu_check.sh", tmp_path / "out"],
            env=os.environ | {"PYTHON": str(python), "PATH": path} | variables,
            capture_output=True,
            text=True,
            cwd=tmp_path.parent,
        )
        assert not result.stderr
        summary = json.loads((tmp_path / "out" / "summary.json").read_text())
        assert [stage["stage"] for stage in summary["stages"]] == STAGES
        return result, summary, {stage["stage"]: stage for stage in summary["stages"]}

    run.out = tmp_path / "out"
    run.python = python
    return run


def test_a_failed_stage_stops_no_other(check):
    result, summary, stages = check()
    assert result.returncode == 1 and "A GPU: 1 of 9 stages did not pass" in result.stdout
    assert summary["device"] == "A GPU" and stages["build"]["detail"] == "built for 9.0a"
    failed = [name for name in STAGES if stages[name]["result"] != "passed"]
    assert failed == ["tests"] and stages["tests"]["result"] == "FAILED: exit status 1"
    assert stages["tests"]["detail"] == "1 failed, 2 passed"
    assert stages["sanitizer"]["detail"] == "no errors in 4 tools"
    assert {path.name for path in check.out.iterdir()} == {
        "summary.json", "summary.md", "logs.tar.gz", "a.png", "b.png", "c.png", "d.png", "e.png",
    }  # fmt: skip
    assert (
        "| tests | 0 | FAILED: exit status 1 | 1 failed, 2 passed |"
        in (check.out / "summary.md").read_text()
    )
    with tarfile.open(check.out / "logs.tar.gz") as logs:
        names = logs.getnames()
        text = logs.extractfile("./logs/tests.log").read().decode()
    assert "REQUIRE_CUDA is 1" in text, "tests without a device would be skipped"
    assert "./logs/racecheck.log" in names and "./benchmark/f.png" in names


def test_every_gpu_test_is_in_one_stage(check):
    """What the stage of ordinary tests leaves out, others run."""
    check()
    calls = (check.python.parent / "calls").read_text().splitlines()
    ordinary = next(call for call in calls if "-k cuda" in call)
    left_out = {word.removeprefix("--ignore=") for word in ordinary.split() if "--ignore" in word}
    run = [word for call in calls for word in call.split() if word.startswith("tests/cuda/test_")]
    assert set(run) == {name for name in left_out if (ROOT / name).exists()}
    assert "tests/cuda/test_cuda_smoke.py" in run and len(run) == len(set(run))


def test_the_time_is_shared_out(check):
    result, summary, stages = check(GPU_CHECK_SECONDS="7", SLEEP="60")
    assert result.returncode == 1 and summary["seconds"] < 15
    assert stages["alone"]["result"] == "FAILED: out of time"
    for name in ("ranks", "ablations", "benchmark", "sanitizer"):
        assert stages[name]["result"] == "not run: no time left"


def test_a_tool_that_finds_an_error(check):
    _, _, stages = check(FAILING_TOOL="racecheck")
    assert stages["sanitizer"]["result"] == "FAILED: exit status 1"
    assert stages["sanitizer"]["detail"].startswith("failed: racecheck")


@pytest.mark.parametrize("missing", ["device", "build"])
def test_what_cannot_be_checked_is_no_success(missing, check):
    pattern = {"device": "*get_device_name*) exit 1 ;;", "build": "*setup.py*) exit 1 ;;"}[missing]
    check.python.write_text(PYTHON.replace('case "$*" in', f'case "$*" in\n  {pattern}'))
    result, summary, stages = check()
    assert result.returncode == 1
    expected = {"device": "no CUDA device", "build": "not run: no build"}[missing]
    assert [stages[name]["result"] for name in STAGES[2:]] == [expected] * 7
    assert summary["device"] == ("none" if missing == "device" else "A GPU")


@pytest.mark.parametrize("missing", ["device", "compute-sanitizer"])
def test_sanitizing_needs_a_device_and_a_tool(missing, tmp_path):
    path = os.environ["PATH"]
    if missing == "device":
        add_program(tmp_path / "compute-sanitizer", SANITIZER)
        path = f"{tmp_path}:{path}"
    elif shutil.which("compute-sanitizer", path=f"{path}:/usr/local/cuda/bin"):
        pytest.skip("it is installed")
    result = subprocess.run(
        [ROOT / "scripts" / "sanitize_cuda.sh"],
        env=os.environ | {"PYTHON": shutil.which("false"), "PATH": path},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 77
    expected = "no CUDA device" if missing == "device" else "compute-sanitizer is not installed"
    assert result.stdout.strip() == expected


def test_usage(tmp_path):
    script = ROOT / "scripts" / "gpu_check.sh"
    result = subprocess.run([script], capture_output=True, text=True)
    assert result.returncode == 2 and result.stderr == "usage: scripts/gpu_check.sh OUT\n"
