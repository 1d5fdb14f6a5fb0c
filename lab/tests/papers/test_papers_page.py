# SPDX-License-Identifier: BSD-3-Clause
"""lab/papers/README.md: the code, the tests and the commands that its rows name exist."""

import importlib
import re
from pathlib import Path

import pytest

from commands import check_command
from lab.emulation import __main__ as emulation

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "lab/papers/README.md").read_text()
FOLDERS = {"python": "tree_attention/reference", ".": "lab/papers/algorithms"}
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


def test_every_result_begins_with_a_verdict():
    verdicts = set(re.findall(r"\*(\w+)\*: ", PAGE.partition("An [index]")[0]))
    found = re.findall(r"^  - result: \*\*(\w+)\.\*\* ", PAGE, re.MULTILINE)
    assert len(found) == PAGE.count("\n  - result: ")
    assert set(found) == verdicts


@pytest.mark.parametrize(
    "module, name", sorted(set(re.findall(r"`([a-z]\w*)\.([A-Za-z]\w*)[`(]", PAGE)))
)
def test_named_code_exists(module, name):
    """Names begin in a module of the algorithms or of the reference, or in the package."""
    assert module in {*CODE, "tree_attention"}
    package = "tree_attention" if module == "tree_attention" else CODE[module]
    assert hasattr(importlib.import_module(package), name)


@pytest.mark.parametrize(
    "path, test", sorted(set(re.findall(r"((?:lab/)?tests/[\w/]+\.py)::(\w+)", PAGE)))
)
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
    assert "python -m lab.papers.lsh" in commands()
    for module in re.findall(r"-m (lab[\w.]*\w)", PAGE):
        assert any(f"-m {module}" in command for command in commands()), module


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
@pytest.mark.parametrize("command", commands())
def test_program_takes_its_command(command, monkeypatch, capsys):
    if command.startswith("python -m lab.emulation -"):
        options = command.partition(" -- ")[0].split()[3:]
        monkeypatch.setattr(emulation, "unsupported", lambda: "not here")
        assert emulation.main(options) == 2  # wrong options exit
        assert capsys.readouterr().err == "not here\n"
    check_command(command, monkeypatch, capsys)


INDEX = PAGE.partition("\n## Index\n")[2].partition("\n## Errata\n")[0]
ALL = {
    "Tree Attention": {"Eq.": 40, "Figure": 4, "Table": 2, "Algorithm": 3, "Observation": 1},
    "LeanAttention": {"Eq.": 1, "Figure": 10, "Table": 1, "Algorithm": 4},
}
ALL["Tree Attention"]["Theorem"] = 1


def index_of(document):
    """The rows of a document's table: its items, the entry's beginning, and how it is shown."""
    table = INDEX.partition(f"| {document} |")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in table.splitlines()[2:]]
    assert rows
    return [(items(cells[0]), *cells[1:]) for cells in rows]


def items(text):
    """("Eq.", 4), ("Eq.", 5) and ("Figure", 1) of "Eq. 4 to 5, Figure 1"."""
    return [
        (kind, number)
        for kind, first, last in re.findall(r"([A-Z][a-z.]+) (\d+)(?: to (\d+))?", text)
        for number in range(int(first), int(last or first) + 1)
    ]


@pytest.mark.parametrize("document", ALL)
def test_index_has_every_item_once(document):
    found = sorted(item for row in index_of(document) for item in row[0])
    assert found == sorted((kind, i + 1) for kind, n in ALL[document].items() for i in range(n))


@pytest.mark.parametrize("document", ALL)
def test_index_names_entries(document):
    section = PAGE.partition(f"\n## {document}\n")[2].partition("\n## ")[0]
    titles = re.findall(r"^- \*\*((?:[^*]|\n)*)\*\*", section, re.MULTILINE)
    for _, entry, how in index_of(document):
        marks = {"tested", "counted", "simulated", "emulated", "measured", "described"}
        assert set(how.partition(":")[0].split(", ")) <= marks, how
        if not how.startswith("described"):
            assert any(re.match(rf"{re.escape(entry)}\b", title) for title in titles), entry


def test_items_of_a_row():
    assert items("Eq. 4 to 6, Eq. 9, Figure 1") == [
        ("Eq.", 4), ("Eq.", 5), ("Eq.", 6), ("Eq.", 9), ("Figure", 1),
    ]  # fmt: skip
