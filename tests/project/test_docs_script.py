# SPDX-License-Identifier: BSD-3-Clause
"""Which Python scripts/docs takes and from where that imports the library, and what it asks for."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# A Python that tells its name and arguments; `{mkdocs}` is what `import mkdocs` exits with, and
# `{library}` an import of the library, which prints an error.
PYTHON = """#!/bin/sh
case "$1 $2" in
  "-c import mkdocs") exit {mkdocs} ;;
  "-c import tree_attention.hf")
    [ {library} = 0 ] || printf 'Traceback\\nModuleNotFoundError: no torch\\n' >&2
    exit {library} ;;
esac
echo "$0" "$PYTHONPATH" "$@"
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The script alone, and a `python3` on the path."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts/docs", tmp_path / "scripts/docs")
    add_python(tmp_path / "bin/python3")
    return tmp_path


def add_python(path: Path, mkdocs: int = 0, library: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(PYTHON.format(mkdocs=mkdocs, library=library))
    path.chmod(0o755)


def docs(checkout: Path, **variables: str) -> subprocess.CompletedProcess:
    environment = {name: x for name, x in os.environ.items() if name != "PYTHON"} | variables
    environment["PATH"] = f"{checkout}/bin:{os.environ['PATH']}"
    script = checkout / "scripts/docs"
    return subprocess.run([script, "--quiet"], env=environment, capture_output=True, text=True)


def test_the_environment_of_the_checkout_comes_first(checkout: Path) -> None:
    taken = [docs(checkout).stdout.split()[0]]
    add_python(checkout / ".venv/bin/python")
    taken += [docs(checkout, **x).stdout.split()[0] for x in ({}, {"PYTHON": "python3"})]
    ours = str(checkout / "bin/python3")
    assert taken == [ours, str(checkout / ".venv/bin/python"), ours]


def test_sources_without_the_extension_do_not_hide_an_installed_package(checkout: Path) -> None:
    extension = checkout / "python/tree_attention/_C.cpython-311-x86_64-linux-gnu.so"
    extension.parent.mkdir(parents=True)
    _, path, *arguments = docs(checkout).stdout.split()
    assert path == ".:scripts/site"
    assert arguments[:2] == ["-m", "mkdocs"] and arguments[-1] == "--quiet"
    extension.touch()
    assert docs(checkout).stdout.split()[1] == ".:scripts/site:python"


def test_missing_mkdocs_names_the_python_that_lacks_it(checkout: Path) -> None:
    add_python(checkout / "bin/python3", mkdocs=1)
    result = docs(checkout)
    assert result.returncode == 1
    command = "python3 -m pip install -r requirements-docs.txt"
    assert result.stderr == f"docs: python3 has no MkDocs. Run: {command}\n"


def test_a_library_that_cannot_be_imported_is_one_line(checkout: Path) -> None:
    add_python(checkout / "bin/python3", library=1)
    result = docs(checkout)
    assert result.returncode == 1 and not result.stdout
    assert result.stderr == (
        "docs: python3 cannot import the library, of which pages are made (ModuleNotFoundError: no "
        "torch). Run: scripts/setup && .venv/bin/python -m pip install -r requirements-docs.txt\n"
    )


def test_what_both_files_pin_is_the_same() -> None:
    line = re.compile(r"^([\w-]+)==(\S+)", re.MULTILINE)
    of_docs = dict(line.findall((ROOT / "requirements-docs.txt").read_text()))
    of_dev = dict(line.findall((ROOT / "requirements-dev.txt").read_text()))
    both = of_docs.keys() & of_dev.keys()
    assert "ruff" in both and not [x for x in both if of_docs[x] != of_dev[x]]
