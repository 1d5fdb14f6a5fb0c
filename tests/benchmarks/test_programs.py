# SPDX-License-Identifier: BSD-3-Clause
"""The programs start the method that their documentation says."""

import subprocess
import sys
from pathlib import Path

import pytest

from ranks_of_commands import started

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(path.name for path in (ROOT / "benchmarks").glob("[a-z]*.py"))
# As python does for a script or a module, in a process that has imported torch. Paths of the
# checkout that pytest has added would hide that a program does not find its own modules.
PROGRAM = """
import os, runpy, sys
root, folder, name = {root!r}, {folder!r}, {name!r}
others = (root, root + "/tests", root + "/benchmarks")
sys.path[:] = [path for path in sys.path if path not in others]
os.chdir(folder)
sys.argv = [name, "--help"]
if name.endswith(".py"):
    sys.path.insert(0, os.path.dirname(name))
    runpy.run_path(name, run_name="__main__")
else:
    sys.path.insert(0, folder)
    runpy.run_module(name, run_name="__main__", alter_sys=True)
"""


def help_of(name: str, folder: Path) -> str:
    program = PROGRAM.format(root=str(ROOT), folder=str(folder), name=name)
    with started([], 1, program=program) as ranks:
        ended = ranks.wait_for_end(0)
    assert ended.status == 0, ended.stderr
    return ended.stdout


def test_an_interpreter_of_its_own_finds_what_a_script_imports(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks/decode.py"), "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "--out DIR" in done.stdout, done.stderr


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_run_by_their_path_from_anywhere(script: str, tmp_path: Path) -> None:
    found = help_of(str(ROOT / "benchmarks" / script), tmp_path)
    # What the referee finds is pasted into results/referee.md; tables are those of pages.
    assert ("--out DIR" in found) == (script not in ("referee.py", "tables.py"))


def test_there_are_scripts() -> None:
    assert {"decode.py", "tree.py", "llama.py", "links.py", "scaling.py"} <= set(SCRIPTS)
