# SPDX-License-Identifier: BSD-3-Clause
"""What scripts/setup says on a machine that lacks something."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def checkout(tmp_path):
    """As much of a fresh clone as the script reads before it needs the network."""
    for name in ("scripts/setup", "requirements-dev.txt", "setup.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "csrc").mkdir()
    return tmp_path


def setup_error(checkout, **variables):
    result = subprocess.run(
        [checkout / "scripts" / "setup"],
        env=os.environ | variables,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 1
    return result.stderr


def add_program(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.mark.parametrize("found", ["no program", "too old"])
def test_missing_python_names_the_package(checkout, found):
    python = checkout / "python3"
    if found == "too old":
        add_program(python, "exit 1")
    error = setup_error(checkout, PYTHON=str(python))
    assert f"no Python >= 3.10 with the venv module and headers was found (tried {python})" in error
    assert "apt install python3-venv python3-dev" in error


@pytest.mark.parametrize(
    ("driver", "chosen", "expected"),
    [
        ("echo 'GPU 0: a GPU (UUID: GPU-0)'", "", "auto"),
        ("echo 'No devices were found'", "", "0"),
        ("exit 9", "", "0"),
        ("exit 9", "1", "1"),
        ("echo 'GPU 0: a GPU (UUID: GPU-0)'", "0", "0"),
    ],
    ids=["gpu", "no gpu", "no driver", "asked for", "refused"],
)
def test_cuda_is_compiled_where_a_gpu_is_visible(checkout, driver, chosen, expected):
    add_program(checkout / "bin" / "nvidia-smi", driver)
    python = f'[ -z "$MAX_JOBS" ] || echo "USE_CUDA=$USE_CUDA" >>{checkout}/built; echo {checkout}'
    add_program(checkout / ".venv" / "bin" / "python", python)
    variables = {"PATH": f"{checkout}/bin:{os.environ['PATH']}", "USE_CUDA": chosen, "CXX": "true"}
    environment = {k: v for k, v in os.environ.items() if k != "MAX_JOBS"} | variables
    script = checkout / "scripts" / "setup"
    result = subprocess.run([script], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert f"Building the extension (USE_CUDA={expected})" in result.stderr
    assert (checkout / "built").read_text() == f"USE_CUDA={expected}\n"
