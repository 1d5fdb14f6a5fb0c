# SPDX-License-Identifier: BSD-3-Clause
"""scripts/gpu_check.sh without a GPU: one call and the one after it, with programs that stand in
for Python and NVIDIA's tools, and what it starts for each kernel."""

import json
import os
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

from test_gpu_stages import ROOT, load

pytestmark = pytest.mark.deep

# The ablations cannot be built, the benchmark hangs and writes what it has, and one test fails.
PYTHON = """#!/bin/bash
echo "$*" >>calls
case "$*" in
  *setup.py*) touch python/tree_attention/_C.so; echo "for $TORCH_CUDA_ARCH_LIST" ;;
  *cuda.ablations*) exit 1 ;;
  *lost_device*) echo '{"rows": []}' >"${!#}/lost_device_cuda.json" ;;
  *decode.py*--only*) ;;
  *decode.py*--quick*) [[ -e again ]] || { echo '{"rows": [1]}' >"${!#}/decode_cuda_quick.json"
    exec sleep 100; } ;;
  *8_bit_keys*) for word; do [[ $word == --junitxml=* ]] && cp report "${word#*=}"; done; exit 1 ;;
esac
exit 0
"""
REPORT = """<testsuites><testsuite>
<testcase classname="a" name="b"/><testcase classname="a" name="c[1]"><failure/></testcase>
</testsuite></testsuites>"""


def test_a_call_and_the_one_after_it(tmp_path, monkeypatch):
    for folder in ("scripts", "csrc", "python/tree_attention", "bin"):
        (tmp_path / folder).mkdir(parents=True)
    for name in ("gpu_check.py", "gpu_check.sh", "gpu_stages.py"):
        text = (ROOT / "scripts" / name).read_text()
        text = text.replace('Stage("benchmark", 120', 'Stage("benchmark", 6')
        (tmp_path / "scripts" / name).write_text(text)
    (tmp_path / "setup.py").write_text("")
    (tmp_path / "report").write_text(REPORT)
    tools = dict.fromkeys(("nvcc", "ncu", "cuobjdump", "compute-sanitizer"), "")
    tools |= {"nvidia-smi": 'echo "A GPU, 9.0"'}
    for name, text in tools.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
    (tmp_path / "bin/python").write_text(PYTHON)
    for path in (tmp_path / "bin").iterdir():
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHON", str(tmp_path / "bin/python"))
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)

    def call(out: str, *earlier: str) -> dict[str, dict]:
        command = ["bash", "scripts/gpu_check.sh", out, *earlier]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 1, done.stdout + done.stderr
        summary = json.loads((tmp_path / out / "check.json").read_text())
        assert summary["device"] == "A GPU" and summary["architectures"] == "9.0"
        return {stage["stage"]: stage for stage in summary["stages"]}

    begin = time.monotonic()
    first = call("first")
    assert time.monotonic() - begin < 40
    results = {name: stage["result"] for name, stage in first.items()}
    wrong = {
        "ablations": "FAILED: exit status 1",
        "benchmark": "FAILED: out of time",
        "8_bits": "FAILED: exit status 1",
        "ptx": "FAILED: exit status 127",  # nvcc made no program
        **dict.fromkeys(("stamps", "tune_cuda"), "not run: needs ablations"),
        "sanitizer": "FAILED: exit status 127",
    }
    assert {name: x for name, x in results.items() if x != "passed"} == wrong
    assert first["8_bits"]["measured"] == {"tests": 2, "skipped": 0, "failed": ["a::c[1]"]}
    assert first["build"]["detail"] == "for 9.0"
    # What hung has left its rows; nothing more comes back than a few files.
    assert {path.name for path in (tmp_path / "first").iterdir()} == {
        "check.json", "check.md", "results.tar.gz", "logs.tar.gz", "extension.tar.xz",
    }  # fmt: skip
    with tarfile.open(tmp_path / "first/results.tar.gz") as found:
        reports = {"lost_device_cuda.json", "decode_cuda_quick.json"}
        assert set(found.getnames()) == {"check.json", "check.md", *reports}
    with tarfile.open(tmp_path / "first/logs.tar.gz") as logs:
        assert {"logs/benchmark.log", "logs/device.log", "results/8_bits.xml"} <= {*logs.getnames()}

    (tmp_path / "calls").unlink()
    (tmp_path / "again").touch()
    python = tmp_path / "bin/python"
    python.write_text(PYTHON.replace("*cuda.ablations*) exit 1", "*cuda.ablations*) exit 0"))
    second = call("second", "first/check.json")
    # What came to an end is not run again, but for what others need.
    wrong = {n: x for n, x in wrong.items() if n not in ("ablations", "stamps", "tune_cuda")}
    assert {n: s["result"] for n, s in second.items() if s["result"] != "passed"} == wrong
    assert second["build"]["detail"] == "was built before"
    calls = (tmp_path / "calls").read_text()
    for again in ("cuda.ablations", "test_kernel", "cuda.stamps", "cuda.tune"):
        assert again in calls
    for not_again in ("decode.py", "lost_device", "8_bit_keys", "setup.py"):
        assert not_again not in calls


def test_the_time_of_a_call_ends_it(tmp_path):
    """Where there is no GPU, and no time for what needs none."""
    environment = os.environ | {"PATH": "/usr/bin:/bin", "CALL_SECONDS": "10"}
    command = [sys.executable, ROOT / "scripts/gpu_check.py", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    results = {x["result"] for x in json.loads((tmp_path / "check.json").read_text())["stages"]}
    assert done.returncode == 1 and "passed" not in results
    assert "not run: no time is left" in results and "not run: needs a GPU" in results
    command = [sys.executable, ROOT / "scripts/gpu_check.py"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and "usage: scripts/gpu_check.sh OUT [EARLIER]" in done.stderr


TESTS = """
import os, time
import pytest

@pytest.mark.parametrize("kernel", ["bfloat16 d64", "bfloat16 int8 d64", "float32 d96"])
def test_kernel(kernel):
    if kernel == "float32 d96":
        time.sleep(50)

@pytest.mark.parametrize("path", ["pages", "one worker"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_path(dtype, path):
    if (dtype, path) == ("fp32", "pages"):
        os._exit(3)

def test_emulated():
    raise AssertionError
"""


def test_each_kernel_has_a_process(tmp_path, monkeypatch, capsys):
    """One that hangs and one that ends its process fail alone."""
    smoke = load(ROOT / "scripts/gpu_smoke.py")
    monkeypatch.setattr(smoke, "LIMITS", ["--timeout", "2", "--timeout-method", "thread"])
    (tmp_path / "test_kernels.py").write_text(TESTS)
    monkeypatch.chdir(tmp_path)
    assert smoke.main(["found.json", "test_kernels.py"]) == 1
    assert json.loads(Path("found.json").read_text()) == {
        "test_kernel bfloat16 d64": "passed",
        "test_kernel bfloat16 int8 d64": "passed",
        "test_kernel float32 d96": "FAILED: status 1",
        "test_path bf16": "passed",
        "test_path fp32": "FAILED: status 3",
    }
    output = capsys.readouterr().out
    assert "time.sleep(50)" in output, "where it hung"
    assert output.splitlines()[-1].startswith("3 of 5 kernels passed without test_")


LOST = """
import torch

def test_first(): pass

def test_breaks_the_device():
    def synchronize():
        raise RuntimeError("an illegal memory access was encountered")
    torch.cuda.is_initialized, torch.cuda.synchronize = lambda: True, synchronize
    raise AssertionError("the first error")

def test_last():
    assert not torch.cuda.is_initialized()
"""


def test_a_lost_device_fails_one_test(tmp_path):
    """The worker that has lost it ends, and another one runs the tests that are left."""
    pytest.importorskip("xdist")
    (tmp_path / "test_device.py").write_text(LOST)
    environment = {key: x for key, x in os.environ.items() if not key.startswith("PYTEST_")}
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n1", "-p", "conftest", "-p", "no:cacheprovider",
         "test_device.py"],
        cwd=tmp_path, capture_output=True, text=True,
        env=environment | {"PYTHONPATH": f"{ROOT / 'tests'}:{ROOT / 'python'}:{ROOT}"},
    )  # fmt: skip
    assert "1 failed, 2 passed" in result.stdout, result.stdout
    assert "test_breaks_the_device" in result.stdout and "the first error" in result.stderr
