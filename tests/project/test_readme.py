# SPDX-License-Identifier: BSD-3-Clause
"""The Python blocks of the documentation run, in order, as one program per page.

The program finds what torchrun gives the only rank of a world of one.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WORLD_OF_ONE = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def python_program(page: Path) -> str:
    """The page with every line outside a Python block emptied, so that line numbers stay."""
    lines, inside = [], False
    for line in page.read_text().splitlines():
        if line.startswith("```"):
            inside = line == "```python"
            line = ""
        lines.append(line if inside else "")
    return "\n".join(lines)


def test_readme_has_python_blocks():
    assert python_program(ROOT / "README.md").strip()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_blocks_run(page, tmp_path):
    program = python_program(page)
    if not program.strip():
        pytest.skip("no Python block")
    script = tmp_path / page.name
    script.write_text(program)
    result = subprocess.run(
        [sys.executable, str(script)],
        cwd=ROOT,
        env=os.environ | WORLD_OF_ONE | {"PYTHONPATH": str(ROOT / "python")},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_files_exist(page):
    """Paths of this repository in links and in code spans, such as `scripts/test.sh`."""
    text = page.read_text()
    names = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", text)
    linked = [page.parent / name for name in names]
    folders = "scripts|csrc|python|tests|docs|examples|benchmarks"
    linked += [ROOT / name for name in re.findall(rf"(?<![\w./])((?:{folders})/[\w./-]*\w)", text)]
    missing = [str(path) for path in linked if not path.exists()]
    assert not missing
