# SPDX-License-Identifier: BSD-3-Clause
"""docs/papers.md: the code, the tests and the commands that its rows name exist."""

import importlib
import re
from pathlib import Path

import pytest

from benchmarks.emulation import __main__ as emulation
from commands import check_command

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/papers.md").read_text()
FOLDERS = {"python": "tree_attention/reference", ".": "benchmarks/papers/algorithms"}
CODE = {
    path.stem: ".".join(path.relative_to(ROOT / root).with_suffix("").parts)
    for root, folder in FOLDERS.items()
    for path in (ROOT / root / folder).glob("*.py")
}


def test_every_entry_has_all_parts():
    """A line in bold is followed by the code, what runs it, and what was published."""
    entries = re.split(r"^- (?=\*\*)", PAGE, flags=re.MULTILINE)[1:]
    assert len(entries) > 50
    for entry in entries:
        parts = re.findall(r"^  - ([^:]*): ?(.*(?:\n    \S.*)*)", entry, re.MULTILINE)
        names = [name for name, _ in parts]
        assert names[0] == "code" and names[1] in ("test or command", "command"), entry
        assert names[2:] == ["result"] and all(text for _, text in parts), entry


@pytest.mark.parametrize(
    "module, name", sorted(set(re.findall(r"`([a-z]\w*)\.([A-Za-z]\w*)[`(]", PAGE)))
)
def test_named_code_exists(module, name):
    """Names begin in a module of the algorithms or of the reference, or in the package."""
    assert module in {*CODE, "tree_attention"}
    package = "tree_attention" if module == "tree_attention" else CODE[module]
    assert hasattr(importlib.import_module(package), name)


@pytest.mark.parametrize("path, test", sorted(set(re.findall(r"(tests/[\w/]+\.py)::(\w+)", PAGE))))
def test_named_test_exists(path, test):
    assert f"\ndef {test}(" in (ROOT / path).read_text()


def commands() -> list[str]:
    """The programs that the page says to run, as `python` and `torchrun` start them."""
    found = []
    for text in re.findall(r"`((?:[^`\n]|\n    )+)`", PAGE):
        command = re.sub(r"(?:sudo )?\.venv/bin/python", "python", " ".join(text.split()))
        if command.startswith(("python ", "torchrun ")) and " -m pytest " not in command:
            found.append(command)
    return sorted(set(found))


def test_all_commands_are_found():
    assert len(commands()) > 20
    assert "python -m benchmarks.papers.lsh" in commands()
    for module in re.findall(r"-m (benchmarks[\w.]*\w)", PAGE):
        assert any(f"-m {module}" in command for command in commands()), module


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
@pytest.mark.parametrize("command", commands())
def test_program_takes_its_command(command, monkeypatch, capsys):
    if command.startswith("python -m benchmarks.emulation -"):
        options = command.partition(" -- ")[0].split()[3:]
        monkeypatch.setattr(emulation, "unsupported", lambda: "not here")
        assert emulation.main(options) == 2  # wrong options exit
        assert capsys.readouterr().err == "not here\n"
    check_command(command, monkeypatch, capsys)
