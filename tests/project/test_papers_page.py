# SPDX-License-Identifier: BSD-3-Clause
"""docs/papers.md: the code, the tests and the commands that its rows name exist."""

import importlib
import re
from pathlib import Path

import pytest

from benchmarks.emulation import __main__ as emulation
from benchmarks.papers.__main__ import FIGURES

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


@pytest.mark.parametrize("module", sorted(set(re.findall(r"-m (benchmarks[\w.]*\w)", PAGE))))
def test_named_program_exists(module):
    if hasattr(importlib.import_module(module), "__path__"):  # a package is run by its __main__
        module += ".__main__"
    assert hasattr(importlib.import_module(module), "main")


def test_emulated_clusters_can_be_wired(monkeypatch, capsys):
    lines = re.findall(r"-m benchmarks\.emulation (--[^`]*?)\s--\s", PAGE)
    assert len(lines) == 2
    monkeypatch.setattr(emulation, "unsupported", lambda: "not here")
    for line in lines:
        assert emulation.main(line.split()) == 2  # wrong options exit
        assert capsys.readouterr().err == "not here\n"


def test_named_figures_exist():
    named = set(re.findall(r"-m benchmarks\.papers (\w+)", PAGE))
    assert named and named <= FIGURES.keys()


@pytest.mark.parametrize(
    "figure, heading, cases",
    [
        (
            "tree_equations_10_to_14",
            "counted",
            ["three_allreduce", "hierarchical", "butterfly", "all_gather", "ring"],
        ),
        ("lean_figure_1", "tiles until the end", ["FlashA", "FlashD", "LeanA"]),
        ("lean_figure_9", "/FA-2 with costs", ["1k", "512k"]),
        ("lean_figure_10", "/FA-2 with costs", ["114k"]),
    ],
)
def test_page_shows_what_the_command_prints(figure, heading, cases):
    report = FIGURES[figure]()
    names, *_ = (column.values for column in report.columns)
    (column,) = (x for x in report.columns if x.heading == heading)
    entries = re.split(r"^- (?=\*\*)", PAGE, flags=re.MULTILINE)
    shown = " ".join(x for x in entries if f"benchmarks.papers {figure}`" in x)
    for case in cases:
        value = next(x for name, x in zip(names, column.values, strict=True) if case in name)
        assert re.search(rf"(?<![\d.,]){re.escape(value)}(?!,?\d)", shown), f"{case}: {value}"
