# SPDX-License-Identifier: BSD-3-Clause
"""docs/documents.md: the commands of its first block give the answers that it shows, and its Python
blocks are one program, which prints what it shows in one process and on two ranks."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from test_readme import ROOT, python_program, run

PAGE = ROOT / "docs/documents.md"


@pytest.mark.deep
def test_commands_of_the_page_give_the_answers(tmp_path: Path) -> None:
    block = re.findall(r"```sh\n(.*?)```", PAGE.read_text(), re.DOTALL)[0]
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    done = subprocess.run(
        ["bash", "-e", "-c", block.replace("python -m", f"{sys.executable} -m")],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT / "python")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    answers = done.stdout.splitlines()
    assert answers == ["48213. Remember it.", "48213."]
    assert all(f"`{answer}`" in PAGE.read_text() for answer in answers)


@pytest.mark.deep
@pytest.mark.parametrize("world_size", [0, 2], ids=["alone", "two ranks"])
def test_program_of_the_page_prints_what_it_shows(world_size: int, tmp_path: Path) -> None:
    program = python_program(PAGE)
    printed = run(program, world_size, OMP_NUM_THREADS="1", TMPDIR=str(tmp_path))
    assert printed.splitlines() == re.findall(r"^ +print\(.*\)  # (.+)$", program, re.MULTILINE)
