# SPDX-License-Identifier: BSD-3-Clause
"""scripts/gpu_check.sh without a GPU: its calls, limits and results, with programs that stand in
for Python, nvcc and NVIDIA's tools."""

import errno
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

from gpu_check_programs import PROGRAMS, REPORT

pytestmark = pytest.mark.deep

ROOT = Path(__file__).parents[2]


def load(path: Path):
    sys.path.insert(0, str(path.parent))
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
    (tmp_path / "report").write_text(REPORT)
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
                for step in script.CALLS[call]
            )
            monkeypatch.setitem(script.CALLS, call, steps)
            monkeypatch.setattr(script, "BUILD", replace(script.BUILD, seconds=seconds))
        status = script.main([call, str(tmp_path / "out")])
        summary = json.loads((tmp_path / f"out/{call}.json").read_text())
        stages = {stage["stage"]: stage for stage in summary["stages"]}
        assert set(stages) == {s.name for step in script.CALLS[call] for s in step}
        assert status == any(stage["result"] != "passed" for stage in stages.values())
        return summary, stages

    run.root = tmp_path
    return run


def results(stages):
    return {name: stage["result"] for name, stage in stages.items()}


def test_stages_share_the_time_of_the_call(check, script, monkeypatch):
    """What hangs takes the time of what is worth less; nothing outlasts the call."""
    monkeypatch.setattr(script, "SECONDS", 20)
    begin = time.monotonic()
    _, stages = check("A", HANGING="benchmark")
    assert time.monotonic() - begin < 26
    assert stages["gate"]["result"] == "passed"
    assert stages["benchmark"]["result"] == "FAILED: out of time"
    assert stages["profile"]["result"] == "not run: no time is left"


def test_call_a(check):
    summary, stages = check("A")
    assert set(results(stages).values()) == {"passed"} and summary["device"] == "A GPU"
    assert stages["build"]["detail"] == "for 9.0" and summary["architectures"] == "9.0"
    assert stages["ptx"]["detail"] == "all answers are right"
    assert stages["smoke"]["measured"] == {"a kernel": "passed"}
    assert stages["profile"]["measured"] == {"a case": {"time": 1.5}}
    out = check.root / "out"
    assert {path.name for path in out.iterdir()} == {
        "A.json", "A.md", "A.logs.tar.gz", "extension.tar.xz",
        "decode_cuda.json", "decode_cuda.md", "tune_cuda.json",
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
    assert check("B")[1]["build"]["detail"] == "for 9.0"
    (check.root / "python/tree_attention/_C.so").write_text("of another build")
    assert check("B")[1]["build"]["detail"] == "for 9.0"
    _, stages = check("B", TORCH_CUDA_ARCH_LIST="9.0+PTX")
    assert stages["build"]["detail"] == "for 9.0+PTX"
    # Without ninja no other choice makes a library old.
    assert "build_ext --inplace --force" in (check.root / "calls").read_text()


def test_without_a_build_what_needs_none_is_done(check):
    _, stages = check("A", FAILING="build")
    assert stages["build"]["result"] == "FAILED: exit status 1"
    assert stages["ptx"]["result"] == stages["machine"]["result"] == "passed"
    assert {results(stages)[name] for name in ("gate", "extension")} == {"not run: needs build"}
    for name in ("benchmark", "profile", "smoke"):
        assert stages[name]["result"] == "not run: needs build and gate"


@pytest.mark.parametrize("fits", [True, False])
def test_a_library_that_was_built_before_saves_the_build(fits, check, tmp_path):
    library = tmp_path / "_C.of_another_machine.so"
    library.write_text("a library")
    if not fits:
        path = check.root / "bin/python"
        path.write_text(path.read_text().replace("name=import", "exit 1"))
    _, stages = check("D", EXTENSION=str(library))
    used = check.root / "python/tree_attention" / library.name
    assert stages["benchmark"]["result"] == "passed"
    if fits:
        assert stages["build"]["detail"] == f"{library.name} is used"
        assert used.read_text() == "a library"
        assert check("B")[1]["build"]["detail"] == "was built before"
    else:
        assert stages["build"]["detail"] == "for 9.0"
        assert not used.exists()


def test_ablations_that_were_built_before_come_with_the_library(check, tmp_path):
    """And are no reason to build none where there is no such library: they may be old."""
    library, built = tmp_path / "_C.so", check.root / "build/ablations/torch-2"
    library.write_text("a library")
    built.mkdir(parents=True)
    (built / "tree_attention_ablations.so").write_text("ablations")
    check("D", EXTENSION=str(library))
    assert "benchmarks.cuda.ablations" not in (check.root / "calls").read_text()
    check("D", EXTENSION="")
    assert "benchmarks.cuda.ablations" in (check.root / "calls").read_text()


def test_the_time_of_a_call_may_be_short(check):
    begin = time.monotonic()
    _, stages = check("A", HANGING="benchmark", CALL_SECONDS="20")
    assert time.monotonic() - begin < 26
    assert stages["profile"]["result"] == "not run: no time is left"


def test_without_a_gpu_nothing_is_a_success(check):
    (check.root / "bin/nvidia-smi").write_text("#!/bin/bash\nexit 9")
    summary, stages = check("A")
    assert summary["device"] is None and stages["build"]["result"] == "passed"
    assert stages["smoke"]["result"] == "not run: needs a GPU and gate"
    assert stages["ptx"]["result"] == "not run: needs a GPU"


def test_a_driver_is_asked_twice(check):
    """The first question may be what loads it."""
    (check.root / "bin/nvidia-smi").write_text(
        '#!/bin/bash\n[[ -e asked ]] && echo "A GPU, 9.0" || { touch asked; exit 9; }'
    )
    assert check("D")[0]["device"] == "A GPU"


def test_one_kernel_gates_all(check):
    """And no other stage does: a smoke test that hangs keeps nothing from running."""
    _, stages = check("A", FAILING="gate")
    assert stages["gate"]["result"] == "FAILED: exit status 1"
    for name in ("benchmark", "profile", "smoke", "launches", "tune_cuda", "rows"):
        assert stages[name]["result"] == "not run: needs gate"
    begin = time.monotonic()
    _, stages = check("A", seconds=6, HANGING="smoke", FAILING="")
    assert time.monotonic() - begin < 30
    assert stages["smoke"]["result"] == "FAILED: out of time"
    assert stages["smoke"]["measured"] == {"a kernel": "passed"}, "what it had found by then"
    assert {name for name, r in results(stages).items() if r != "passed"} == {"smoke"}


def test_a_stage_that_is_killed_stops_no_other(check):
    _, stages = check("A", KILLED="benchmark")
    assert stages["benchmark"]["result"] in ("FAILED: signal 9", "FAILED: exit status 137")
    assert {name for name, r in results(stages).items() if r != "passed"} == {"benchmark"}


def test_results_are_written_as_stages_end(check, script, monkeypatch):
    """What is there when the call itself is killed."""
    execute = script.Run.execute

    def until(self, stage, seconds):
        if stage.name == "profile":
            raise KeyboardInterrupt
        return execute(self, stage, seconds)

    monkeypatch.setattr(script.Run, "execute", until)
    with pytest.raises(KeyboardInterrupt):
        check("A")
    summary = json.loads((check.root / "out/A.json").read_text())
    assert summary["stages"][-1]["result"] == "passed"
    assert "| benchmark |" in (check.root / "out/A.md").read_text()
    assert (check.root / "out/decode_cuda.json").exists()


def test_call_b(check):
    _, stages = check("B", FAILING="tests", PYTHONPATH="/carried")
    assert [name for name, r in results(stages).items() if r != "passed"] == ["8_bits"]
    assert stages["8_bits"]["detail"] == "1  failed"
    assert stages["8_bits"]["measured"] == {"tests": 3, "skipped": 1, "failed": ["a::c[1]"]}
    with tarfile.open(check.root / "out/B.logs.tar.gz") as logs:
        text = logs.extractfile("logs/8_bits.log").read().decode()
    assert "REQUIRE_CUDA is 1" in text, "tests without a device would be skipped"
    assert f"{check.root}/python:{check.root}:/carried\n" in text


def test_what_cannot_be_written_is_a_remark(check, script, monkeypatch, capsys):
    """As a file that a stage writes while it is read."""

    def replace(*_):
        raise OSError("file changed as we read it")

    monkeypatch.setattr(script.shutil, "copyfile", replace)
    _, stages = check("D")
    assert set(results(stages).values()) == {"passed"}
    assert "out is not complete: file changed as we read it" in capsys.readouterr().out


def test_a_machine_without_git(check, monkeypatch):
    tools = check.root / "tools"
    tools.mkdir()
    for folder in ("/usr/bin", "/bin"):
        for path in Path(folder).iterdir():
            if path.name != "git" and not (tools / path.name).is_symlink():
                (tools / path.name).symlink_to(path)
    monkeypatch.setenv("PATH", f"{check.root / 'bin'}:{tools}")
    assert shutil.which("git") is None
    summary, stages = check("D")
    assert summary["commit"] == "" and set(results(stages).values()) == {"passed"}


def test_results_on_another_file_system(check, monkeypatch, capsys):
    def rename(*_):
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "rename", rename)
    check("A")
    assert tarfile.is_tarfile(check.root / "out/extension.tar.xz")
    assert "is not complete" not in capsys.readouterr().out


def test_workers_where_there_are_any(check):
    check("B")
    calls = (check.root / "calls").read_text()
    assert "-n4" in calls
    (check.root / "calls").unlink()
    python = check.root / "bin/python"
    python.write_text(PROGRAMS["python"].replace("case", "[[ $* == *xdist* ]] && exit 1\ncase", 1))
    python.write_text("#!/bin/bash\n" + python.read_text())
    check("B")
    calls = (check.root / "calls").read_text()
    assert "-m pytest" in calls and "-n4" not in calls


@pytest.mark.parametrize("tool", [None, "racecheck"])
def test_call_c(tool, check):
    _, stages = check("C", FAILING_TOOL=tool or "")
    result = "FAILED: exit status 1" if tool else "passed"
    assert stages["sanitizer"]["result"] == result
    assert stages["tune_cuda"]["result"] == "passed", "whatever the sanitizer finds"
    assert (check.root / "out/tune_cuda.json").exists()
    lines = [line for line in (check.root / "calls").read_text().splitlines()
             if line.startswith("--tool")]  # fmt: skip
    assert {line.split()[1] for line in lines} == {"memcheck", "racecheck"}
    assert all(line.count("test_cuda_smoke.py::test_kernel[") == 6 for line in lines)


def test_call_d(check):
    _, stages = check("D")
    assert set(results(stages).values()) == {"passed"}
    assert (check.root / "out/decode_cuda.md").exists()


@pytest.mark.parametrize("arguments", [[], ["A"], ["E", "out"]])
def test_usage(arguments):
    script = ROOT / "scripts/gpu_check.sh"
    result = subprocess.run([script, *arguments], capture_output=True, text=True)
    assert result.returncode == 2
    assert result.stderr == "usage: scripts/gpu_check.sh A|B|C|D OUT\n"
