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


def test_missing_compiler_names_the_package(checkout):
    add_program(checkout / ".venv" / "bin" / "python", f"echo {checkout}")
    error = setup_error(checkout, CXX="no-such-compiler")
    assert "no C++ compiler (no-such-compiler) was found" in error
    assert "apt install g++" in error
