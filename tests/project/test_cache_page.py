# SPDX-License-Identifier: BSD-3-Clause
"""docs/cache.md: its Python blocks are one program, which prints what it shows in one process and
on two ranks; its block of torchao, which need not be installed, runs after the block before it."""

import re
from pathlib import Path

import pytest

from test_readme import ROOT, python_lines, run

PAGE = (ROOT / "docs/cache.md").read_text()
(TORCHAO,) = re.findall(r"```python\n(from torchao.*?)```", PAGE, re.DOTALL)


@pytest.mark.deep
@pytest.mark.parametrize("world_size", [0, 2], ids=["alone", "two ranks"])
def test_program_of_the_page_prints_what_it_shows(world_size: int, tmp_path: Path) -> None:
    program = python_lines(PAGE.replace(TORCHAO, ""))
    printed = run(program, world_size, OMP_NUM_THREADS="1", TMPDIR=str(tmp_path))
    assert printed.splitlines() == re.findall(r"^ +print\(.*\)  # (.+)$", program, re.MULTILINE)
    assert (tmp_path / "passkey-cache" / "index.json").exists()


@pytest.mark.deep
def test_block_of_torchao_runs_after_the_first() -> None:
    pytest.importorskip("torchao")
    before = python_lines(PAGE.partition(TORCHAO)[0])
    run(f"{before}\n{TORCHAO}")
