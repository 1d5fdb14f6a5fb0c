# SPDX-License-Identifier: BSD-3-Clause
"""Programs that `scripts/gpu_check.py` starts: each kernel's tests have a process of their own."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from test_gpu_check_script import ROOT, load

pytestmark = pytest.mark.deep

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


def test_a_process_that_ignores_the_limit_of_its_tests_ends(tmp_path, monkeypatch):
    smoke = load(ROOT / "scripts/gpu_smoke.py")
    monkeypatch.setattr(smoke, "LIMITS", [])
    monkeypatch.setattr(smoke, "SECONDS", 2)
    (tmp_path / "test_kernels.py").write_text(
        "import time\ndef test_merge():\n    time.sleep(50)\n"
    )
    monkeypatch.chdir(tmp_path)
    assert smoke.main(["found.json", "test_kernels.py"]) == 1
    assert json.loads(Path("found.json").read_text()) == {"test_merge": "FAILED: out of time"}


def test_what_loads_all_kernels_has_a_limit_of_its_own(tmp_path, monkeypatch):
    smoke = load(ROOT / "scripts/gpu_smoke.py")
    monkeypatch.setattr(smoke, "LIMITS", ["--timeout", "2", "--timeout-method", "thread"])
    monkeypatch.setattr(smoke, "SECONDS", 3)
    (tmp_path / "test_kernels.py").write_text(
        "import time\nimport pytest\n"
        "def test_merge():\n    pass\n"
        "@pytest.mark.timeout(20)\ndef test_resident_blocks():\n    time.sleep(4)\n"
        "def test_path():\n    time.sleep(4)\n"
    )
    monkeypatch.chdir(tmp_path)
    assert smoke.main(["found.json", "test_kernels.py"]) == 1
    found = json.loads(Path("found.json").read_text())
    assert found["test_merge"] == found["test_resident_blocks"] == "passed"
    assert found["test_path"].startswith("FAILED: ")
    ours = (ROOT / "tests/cuda/test_cuda_smoke.py").read_text()
    limit = re.search(rf"@pytest.mark.timeout\((\d+)\).*\ndef {smoke.LONG}\(", ours)
    assert limit and int(limit[1]) < smoke.LONG_SECONDS


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
