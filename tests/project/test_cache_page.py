# SPDX-License-Identifier: BSD-3-Clause
"""docs/cache.md: its Python blocks are one program, which runs on two ranks."""

from pathlib import Path

import pytest

from test_readme import ROOT, TWO_RANKS, python_program, run


@pytest.mark.deep
def test_program_of_the_page_runs_on_two_ranks(tmp_path: Path) -> None:
    script = tmp_path / "cache.py"
    program = python_program(ROOT / "docs/cache.md")
    script.write_text(program)
    run(script, *TWO_RANKS, OMP_NUM_THREADS="1", TMPDIR=str(tmp_path))
    assert (tmp_path / "passkey-cache" / "index.json").exists()
