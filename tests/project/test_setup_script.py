# SPDX-License-Identifier: BSD-3-Clause
"""What scripts/setup, and scripts that need what it makes, say where something is missing."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def checkout(tmp_path):
    """As much of a fresh clone as the script reads before it needs the network."""
    for name in ("scripts/setup", "requirements.txt", "requirements-dev.txt", "setup.py"):
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


def test_another_system_is_refused_before_anything_is_made(checkout):
    add_program(checkout / "bin" / "uname", "echo Darwin")
    error = setup_error(checkout, PATH=f"{checkout}/bin:{os.environ['PATH']}")
    assert error.startswith(
        "setup: tree_attention runs on Linux alone; on Windows install it in WSL"
    )
    assert error.endswith("(this is Darwin)\n") and not (checkout / ".venv").exists()


@pytest.mark.parametrize("develop", [None, "0"])
def test_what_the_demonstration_needs_is_a_part(develop, checkout):
    """The demonstration starts earlier for it. A contributor's set-up afterwards installs the rest,
    and builds nothing again."""
    python = checkout / ".venv" / "bin" / "python"
    add_program(python, f'echo "$*" >>{checkout}/calls; echo {checkout}')
    extension = checkout / "python" / "tree_attention" / f"_C{checkout}"
    extension.parent.mkdir(parents=True)
    extension.touch()
    kept = {name: x for name, x in os.environ.items() if name != "DEVELOP"}

    def calls(**chosen):
        script = checkout / "scripts" / "setup"
        subprocess.run([script], env=kept | chosen, check=True, capture_output=True)
        lines = (checkout / "calls").read_text().splitlines()
        (checkout / "calls").unlink()
        return [line for line in lines if "pip install" in line or "build_ext" in line]

    lists = ["requirements.txt", "requirements-dev.txt"]
    first = calls() if develop is None else calls(DEVELOP=develop)
    *installed, built = first
    assert [line.split()[-1] for line in installed] == lists[: 2 - (develop is not None)]
    assert "build_ext --inplace" in built
    after = calls()
    assert [line.split()[-1] for line in after] == lists[1:] * (develop is not None)


def test_setup_py_alone_decides_about_cuda_again_for_another_gpu(checkout):
    """Only what decides is kept: an unchanged machine builds once."""
    driver = checkout / "bin" / "nvidia-smi"
    python = f'[ -z "$MAX_JOBS" ] || echo "USE_CUDA=$USE_CUDA" >>{checkout}/built; echo {checkout}'
    add_program(checkout / ".venv" / "bin" / "python", python)
    variables = {"PATH": f"{checkout}/bin:{os.environ['PATH']}", "CXX": "true"}
    given = {k: v for k, v in os.environ.items() if k not in ("MAX_JOBS", "USE_CUDA")} | variables
    (checkout / "python" / "tree_attention").mkdir(parents=True)
    (checkout / "python" / "tree_attention" / f"_C{checkout}").parent.mkdir(parents=True)
    (checkout / "python" / "tree_attention" / f"_C{checkout}").touch()

    def built(**chosen):
        script = checkout / "scripts" / "setup"
        result = subprocess.run([script], env=given | chosen, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        path = checkout / "built"
        lines = path.read_text().splitlines() if path.exists() else []
        path.unlink(missing_ok=True)
        return lines

    add_program(driver, "exit 9")
    assert [built(), built()] == [["USE_CUDA=auto"], []]
    add_program(driver, "echo 'GPU 0: a GPU (UUID: GPU-0)'")
    assert [built(), built()] == [["USE_CUDA=auto"], []]
    assert [built(USE_CUDA="0"), built(USE_CUDA="1")] == [["USE_CUDA=0"], ["USE_CUDA=1"]]


@pytest.mark.parametrize(
    ("script", "lacks", "message"),
    [
        ("lint.sh", "python", "lint: there is no .venv/bin/clang-format. Run: scripts/setup"),
        ("lint.sh", "mypy", "lint: there is no .venv/bin/mypy. Run: scripts/setup"),
        ("sanitize.sh", "python", "sanitize: .venv/bin/python has no torch, whose headers are"),
        ("sanitize.sh", "g++", "sanitize: there is no no-compiler: apt install g++, or name"),
        (
            "sanitize_cuda.sh",
            "python",
            "sanitize_cuda: .venv/bin/python has no torch. Run: scripts",
        ),
    ],
)
def test_scripts_name_what_they_lack(script, lacks, message, tmp_path):
    """In one sentence, before they do anything."""
    path = tmp_path / "scripts" / script
    path.parent.mkdir()
    shutil.copy(ROOT / "scripts" / script, path)
    for tool in ("python", "clang-format", "ruff", "mypy"):
        if lacks not in (tool, "python"):
            add_program(tmp_path / ".venv" / "bin" / tool, "exit 0")
    add_program(tmp_path / "bin" / "compute-sanitizer", "exit 0")
    add_program(tmp_path / "bin" / "git", "echo a.cpp")
    kept = {name: x for name, x in os.environ.items() if name != "PYTHON"}
    variables = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "CXX": "no-compiler"}
    result = subprocess.run([path], env=kept | variables, capture_output=True, text=True)
    assert result.returncode == 1 and result.stderr.startswith(message), result.stderr
    assert result.stderr.count("\n") == 1 and not result.stdout
