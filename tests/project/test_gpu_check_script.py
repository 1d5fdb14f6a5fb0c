# SPDX-License-Identifier: BSD-3-Clause
"""scripts/gpu_check.sh without a GPU: its calls, limits and results, with programs that stand in
for Python, nvcc and NVIDIA's tools."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
from dataclasses import replace
from pathlib import Path

import pytest

pytestmark = pytest.mark.deep

ROOT = Path(__file__).parents[2]

PROGRAMS = {
    "nvidia-smi": 'echo "A GPU, 9.0"',
    "nvcc": """
while [[ $# -gt 0 && $1 != -o ]]; do shift; done
[[ $# == 0 ]] && exit
printf '#!/bin/bash\\necho all answers are right\\n' >"$2"; chmod +x "$2"
""",
    "ncu": 'while [[ $1 != -o ]]; do shift || exit 0; done; echo report >"$2.ncu-rep"',
    "cuobjdump": 'echo "Function kernel: REG:128"',
    "compute-sanitizer": """
echo "$*" >>calls
[[ $2 == "${FAILING_TOOL:-}" ]] && status=99
echo "a test PASSED"
echo "========= ERROR SUMMARY: ${status:-0} errors"
exit "${status:-0}"
""",
    "python": """
echo "$*" >>calls
name=none
case "$*" in
  *setup.py*) name=build; touch python/tree_attention/_C.so; echo "for $TORCH_CUDA_ARCH_LIST" ;;
  *gpu_smoke*) name=smoke; echo '{"a kernel": "passed"}' >"$2"; echo "1 of 1 kernels passed" ;;
  *decode.py*) name=benchmark; touch "${!#}"/decode_cuda.{json,md} ;;
  *tune*) name=tune; echo '{"rows": []}' >"${!#}/tune_cuda.json" ;;
  *cuda.profile*) name=profile; echo '{"a case": {"time": 1.5}}' >"$3.json" ;;
  *" tests") name=tests; echo "REQUIRE_CUDA is $REQUIRE_CUDA"; echo '1 | failed'; ;;
esac
[[ $name == "${HANGING:-}" ]] && sleep 100
[[ $name == "${KILLED:-}" ]] && kill -9 $$
[[ $name == "${FAILING:-}" ]] && exit 1
exit 0
""",
}


def load(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def script():
    return load(ROOT / "scripts/gpu_check.py")


@pytest.fixture
def check(script, tmp_path, monkeypatch):
    """Runs a call in a folder that has as much of a checkout as it reads."""
    for folder in ("scripts", "csrc", "python/tree_attention", "bin"):
        (tmp_path / folder).mkdir(parents=True)
    shutil.copy(ROOT / "scripts/sanitize_cuda.sh", tmp_path / "scripts")
    (tmp_path / "setup.py").write_text("")
    (tmp_path / "csrc/kernel.cu").write_text("")
    for name, text in PROGRAMS.items():
        path = tmp_path / "bin" / name
        path.write_text(f"#!/bin/bash\n{text}")
        path.chmod(0o755)
    monkeypatch.setattr(script, "ROOT", tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHON", str(tmp_path / "bin/python"))
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)

    def run(call: str, seconds: int | None = None, **variables: str):
        """With `seconds` as the limit of every stage."""
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        if seconds is not None:
            steps = tuple(
                tuple(replace(stage, seconds=seconds) for stage in step)
                for step in script.CALLS[call].steps
            )
            monkeypatch.setitem(script.CALLS, call, replace(script.CALLS[call], steps=steps))
            monkeypatch.setattr(script, "BUILD", replace(script.BUILD, seconds=seconds))
        status = script.main([call, str(tmp_path / "out")])
        summary = json.loads((tmp_path / f"out/{call}.json").read_text())
        stages = {stage["stage"]: stage for stage in summary["stages"]}
        assert set(stages) == {s.name for step in script.CALLS[call].steps for s in step}
        assert status == any(stage["result"] != "passed" for stage in stages.values())
        return summary, stages

    run.root = tmp_path
    return run


def results(stages):
    return {name: stage["result"] for name, stage in stages.items()}


@pytest.mark.parametrize("call", "ABCD")
def test_the_limits_fit_into_the_time_of_the_call(call, script):
    """So that no stage, whatever it does, takes the time of a later one."""
    steps = script.CALLS[call].steps
    longest = sum(max(stage.seconds for stage in step) + 2 * script.GRACE for step in steps)
    assert longest + 5 <= script.CALLS[call].seconds < 600
    names = {"a GPU"}
    for step in steps:
        for stage in step:
            assert set(stage.needs) <= names, stage
        names |= {stage.name for stage in step}


def test_every_gpu_test_is_in_one_stage(script):
    """What the stage of ordinary tests leaves out, others run."""
    run = [
        word for call in script.CALLS.values() for step in call.steps for stage in step
        for word in stage.command if word.startswith("tests/cuda/test_")
    ]  # fmt: skip
    ordinary = next(stage for step in script.CALLS["B"].steps for stage in step
                    if stage.name == "tests")  # fmt: skip
    left_out = [w.removeprefix("--ignore=") for w in ordinary.command if w.startswith("--ignore=")]
    assert sorted(run) == sorted(left_out) and len(set(run)) == len(run) == 8
    assert all((ROOT / name).exists() for name in run)


def test_call_a(check):
    summary, stages = check("A")
    assert set(results(stages).values()) == {"passed"} and summary["device"] == "A GPU"
    assert stages["build"]["detail"] == "for 9.0a" and summary["architectures"] == "9.0a"
    assert stages["ptx"]["detail"] == "all answers are right"
    assert stages["smoke"]["measured"] == {"a kernel": "passed"}
    assert stages["profile"]["measured"] == {"a case": {"time": 1.5}}
    out = check.root / "out"
    assert {path.name for path in out.iterdir()} == {
        "A.json", "A.md", "A.logs.tar.gz", "extension.tar.xz",
        "decode_cuda.json", "decode_cuda.md",
    }  # fmt: skip
    with tarfile.open(out / "A.logs.tar.gz") as logs:
        names = logs.getnames()
    assert {"logs/smoke.log", "logs/device.log", "results/profile.ncu-rep"} <= set(names)
    with tarfile.open(out / "extension.tar.xz") as built:
        assert built.getnames() == ["python/tree_attention/_C.so", "build/gpu_check.stamp"]


def test_a_later_call_does_not_build_again(check):
    check("A")
    assert check("D")[1]["build"]["detail"] == "was built before"
    # Of another machine: what A handed over takes the place of the build.
    for path in ("python/tree_attention/_C.so", "build/gpu_check.stamp"):
        (check.root / path).unlink()
    subprocess.run(["tar", "-xf", "out/extension.tar.xz"], cwd=check.root, check=True)
    assert check("C")[1]["build"]["detail"] == "was built before"
    (check.root / "csrc/kernel.cu").write_text("changed")
    assert check("B")[1]["build"]["detail"] == "for 9.0a"
    (check.root / "python/tree_attention/_C.so").write_text("of another build")
    assert check("B")[1]["build"]["detail"] == "for 9.0a"


def test_without_a_build_what_needs_none_is_done(check):
    _, stages = check("A", FAILING="build")
    assert stages["build"]["result"] == "FAILED: exit status 1"
    assert stages["ptx"]["result"] == stages["machine"]["result"] == "passed"
    assert {results(stages)[name] for name in ("smoke", "extension")} == {"not run: needs build"}
    for name in ("benchmark", "profile"):
        assert stages[name]["result"] == "not run: needs build and smoke"


def test_without_a_gpu_nothing_is_a_success(check):
    (check.root / "bin/nvidia-smi").write_text("#!/bin/bash\nexit 9")
    summary, stages = check("A")
    assert summary["device"] is None and stages["build"]["result"] == "passed"
    assert stages["smoke"]["result"] == "not run: needs a GPU"
    assert stages["ptx"]["result"] == "not run: needs a GPU"


def test_a_smoke_test_that_hangs_ends_the_call(check):
    begin = time.monotonic()
    _, stages = check("A", seconds=2, HANGING="smoke")
    assert time.monotonic() - begin < 20
    assert stages["smoke"]["result"] == "FAILED: out of time"
    assert stages["smoke"]["measured"] == {"a kernel": "passed"}, "what it had found by then"
    for name in ("benchmark", "profile"):
        assert stages[name]["result"] == "not run: needs smoke"


def test_a_stage_that_is_killed_stops_no_other(check):
    _, stages = check("A", KILLED="benchmark")
    assert stages["benchmark"]["result"] in ("FAILED: signal 9", "FAILED: exit status 137")
    assert {name for name, r in results(stages).items() if r != "passed"} == {"benchmark"}


def test_results_are_written_as_stages_end(check, script, monkeypatch):
    """What is there when the call itself is killed."""
    execute = script.Run.execute

    def until(self, stage):
        if stage.name == "profile":
            raise KeyboardInterrupt
        return execute(self, stage)

    monkeypatch.setattr(script.Run, "execute", until)
    with pytest.raises(KeyboardInterrupt):
        check("A")
    summary = json.loads((check.root / "out/A.json").read_text())
    assert summary["stages"][-1]["result"] == "passed"
    assert "| benchmark |" in (check.root / "out/A.md").read_text()
    assert (check.root / "out/decode_cuda.json").exists()


def test_call_b(check):
    _, stages = check("B", FAILING="tests")
    assert [name for name, r in results(stages).items() if r != "passed"] == ["tests"]
    assert stages["tests"]["detail"] == "1  failed"
    with tarfile.open(check.root / "out/B.logs.tar.gz") as logs:
        text = logs.extractfile("logs/tests.log").read().decode()
    assert "REQUIRE_CUDA is 1" in text, "tests without a device would be skipped"


def test_workers_where_there_are_any(check):
    check("B")
    calls = (check.root / "calls").read_text()
    assert "-n8" in calls
    (check.root / "calls").unlink()
    python = check.root / "bin/python"
    python.write_text(PROGRAMS["python"].replace("case", "[[ $* == *xdist* ]] && exit 1\ncase", 1))
    python.write_text("#!/bin/bash\n" + python.read_text())
    check("B")
    calls = (check.root / "calls").read_text()
    assert "-m pytest" in calls and "-n8" not in calls


@pytest.mark.parametrize("tool", [None, "racecheck"])
def test_call_c(tool, check):
    _, stages = check("C", FAILING_TOOL=tool or "")
    result = "FAILED: exit status 1" if tool else "passed"
    assert stages["sanitizer"]["result"] == result
    assert stages["tune_cuda"]["result"] == "passed", "whatever the sanitizer finds"
    assert (check.root / "out/tune_cuda.json").exists()
    lines = (check.root / "calls").read_text().splitlines()
    watched = {line.split()[1]: "--kernel-regex kns=tree_attention" in line
               for line in lines if line.startswith("--tool")}  # fmt: skip
    assert watched == {"memcheck": True, "racecheck": True, "synccheck": True, "initcheck": False}


def test_call_d(check):
    _, stages = check("D")
    assert set(results(stages).values()) == {"passed"}
    assert (check.root / "out/decode_cuda.md").exists()


@pytest.mark.parametrize("missing", ["device", "compute-sanitizer"])
def test_sanitizing_needs_a_device_and_a_tool(missing, tmp_path):
    path = os.environ["PATH"]
    if missing == "device":
        tool = tmp_path / "compute-sanitizer"
        tool.write_text("#!/bin/bash\n")
        tool.chmod(0o755)
        path = f"{tmp_path}:{path}"
    elif shutil.which("compute-sanitizer", path=f"{path}:/usr/local/cuda/bin"):
        pytest.skip("it is installed")
    result = subprocess.run(
        [ROOT / "scripts/sanitize_cuda.sh"], capture_output=True, text=True,
        env=os.environ | {"PYTHON": shutil.which("false"), "PATH": path},
    )  # fmt: skip
    assert result.returncode == 77
    expected = "no CUDA device" if missing == "device" else "compute-sanitizer is not installed"
    assert result.stdout.strip() == expected


@pytest.mark.parametrize("arguments", [[], ["A"], ["E", "out"]])
def test_usage(arguments):
    script = ROOT / "scripts/gpu_check.sh"
    result = subprocess.run([script, *arguments], capture_output=True, text=True)
    assert result.returncode == 2
    assert result.stderr == "usage: scripts/gpu_check.sh A|B|C|D OUT\n"
