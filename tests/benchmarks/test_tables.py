# SPDX-License-Identifier: BSD-3-Clause
"""Tables of README.md and docs/ are those that benchmarks/tables.py writes from today's results."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import tables
from benchmarks.harness import regions, results

PAGES = [page for page in tables.PAGES if tables.names_of(page.read_text())]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tables_of_a_page_are_those_of_the_results(page: Path) -> None:
    if page.name == "cache_layers.md":
        pytest.importorskip("transformers")
    text = page.read_text()
    assert tables.written(text) == text, "run: python benchmarks/tables.py"


def test_every_table_has_one_place() -> None:
    names = [name for page in PAGES for name in tables.names_of(page.read_text())]
    assert sorted(names) == sorted(tables.TABLES)


def outside(page: str) -> Iterator[str]:
    """The tables of a page that no program writes."""
    by_hand = re.sub(rf"{regions.mark('[^>]*')}.*?{regions.END}", "", page, flags=re.DOTALL)
    yield from re.findall(r"(?:^\|.*\n)+", by_hand, re.MULTILINE)


# Tables with units that no program writes, by their page and first heading.
BY_HAND = {
    ("big_models.md", "run"),  # its test loads the models and counts
    ("gpu_offline.md", "part"),  # sizes of files that another machine packed
    ("models.md", "NAME on the Hugging Face Hub"),  # the size of a published checkpoint
    ("troubleshooting.md", "what you see"),  # messages
}


def test_measurements_are_written_by_a_program() -> None:
    assert not [*outside((tables.ROOT / "docs/measured.md").read_text())]
    units = re.compile(r"\d (ms|us|µs|GB|tokens/s)\b|\b(ms|us|MB|GB|kB)( |,|:)")
    found = {
        (page.name, re.split(r" *\| *", table)[1])
        for page in tables.PAGES
        for table in outside(page.read_text())
        if units.search(table)
    }
    assert found == BY_HAND


@pytest.fixture
def faster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A result in which vLLM has become faster."""
    for path in results.RESULTS.glob("*.md"):
        (tmp_path / path.name).symlink_to(path)
    (changed := tmp_path / "two_hosts.md").unlink()
    text = (results.RESULTS / "two_hosts.md").read_text()
    row = {"link": tables.FAST, "engine": tables.VLLM_ON_TWO}
    (cells,) = (x for x in results.read_table("two_hosts").rows if row.items() <= x.items())
    cell = f"| {cells['between tokens ms']} |"
    assert text.count(cell) == 1
    changed.write_text(text.replace(cell, "| 1.25 (1.00, 1.00) |"))
    monkeypatch.setattr(results, "RESULTS", tmp_path)


@pytest.mark.usefixtures("faster")
def test_another_result_is_another_table() -> None:
    text = (tables.ROOT / "docs/vllm.md").read_text()
    changed = tables.written(text)
    (line,) = set(changed.splitlines()) - set(text.splitlines())
    assert "| **1.25 ms** |" in line and line.count("**") == 2


def test_a_changed_page_is_written_again() -> None:
    text = (tables.ROOT / "docs/vllm.md").read_text()
    assert tables.written(text.replace("**34.2 ms**", "34.1 ms")) == text
    assert tables.written(text.replace("## Speed", "## Times")) != text


def test_numbers_of_a_table() -> None:
    numbers = (0.02731, 0.99951, 5.234, 34.25, 99.96, 445.4, 1297.6)
    texts = ["0.0273", "1.00", "5.23", "34.2", "100", "445", "1,298"]
    assert [tables.figure(x) for x in numbers] == texts
    assert [tables.ratio(x) for x in (0.953, 3.049, 33.08)] == ["0.95", "3.05", "33.1"]
    assert tables.best([2.0, None, 1.0]) == ["2.00", "", "**1.00**"]
    assert tables.best([2.0, 1.0], better=max) == ["**2.00**", "1.00"]
    lines = ["| what | ms | with |", "| --- | ---: | --- |", "| 4k keys | **1.0** | vLLM 2 |"]
    lines.append("| 8 keys, warm | | |")
    rows = [["what", "ms", "with"], ["4k keys", "**1.0**", "vLLM 2"], ["8 keys, warm", "", ""]]
    assert tables.markdown(rows).splitlines() == lines


def test_a_region_without_its_marks_is_refused() -> None:
    page = f"a\n{regions.mark('x')}b\n{regions.END}c\n"
    assert regions.written(page, "x", "d") == f"a\n{regions.mark('x')}\nd\n\n{regions.END}c\n"
    other = page.replace("by x", "by y")
    for broken in (page.replace(regions.END, ""), other, page.replace(regions.END, "") + other):
        with pytest.raises(ValueError, match="must have a line"):
            regions.written(broken, "x", "d")
