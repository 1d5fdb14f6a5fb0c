# SPDX-License-Identifier: BSD-3-Clause
"""Pages say things in the field's words: CONTRIBUTING.md, "How we write", has the list.

Programs, code spans and what programs print are left out, and so are the pages of results, which
programs wrote.
"""

import re
from pathlib import Path

import pytest

from test_links import ROOT, WRITTEN_BY_HAND, name_of

INSTEAD = {
    r"anew": "again",
    r"mend(s|ed|ing|ings)?": "corrected, repaired, fixed",
    r"soone(r|st)": "faster, earlier",
    r"dealt|deals": "split, given to the ranks in turn",
    r"behind": "after; a firewall, and being slower, keep it",
    r"beside": "next to, compared with, in addition to",
    r"whole weights": "replicated weights",
    r"ours": "tree_attention, this library",
    r"(?:ms|us|seconds) an? (?:token|layer|step)": "ms per token",
}
# Where a word of the list means what it says.
MEANT = re.compile(
    r"behind a firewall|(%|left|are) behind|Reads behind|sooner or later|"
    # Entries of the papers, whose labels programs of the lab print as well.
    r"Ours[:, ]|(compared with|differs from|\d) ours|ours( by at most|, and| is given)"
)


def prose(text: str) -> str:
    """The text without code blocks, code spans and targets of links; lines keep their numbers."""

    def blank(match: re.Match[str]) -> str:
        return re.sub(r"[^\n]", " ", match[0])

    # The options of commands, each with its own test of words.
    of_options = r"<!-- written by scripts/command_line\.py.*?<!-- end -->"
    text = re.sub(of_options, blank, text, flags=re.DOTALL)
    text = re.sub(r"^```.*?^```", blank, text, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"`[^`]*`|\]\([^)]*\)", blank, text)


def house_words(text: str) -> list[str]:
    text = MEANT.sub("", prose(text))
    return [
        f"line {i}: {found[0]} (say: {instead})"
        for i, line in enumerate(text.splitlines(), 1)
        for word, instead in INSTEAD.items()
        for found in re.finditer(rf"\b({word})\b", line, re.IGNORECASE)
    ]


@pytest.mark.parametrize("page", WRITTEN_BY_HAND, ids=name_of)
def test_pages_have_no_house_words(page: Path) -> None:
    assert not house_words(page.read_text())


@pytest.mark.parametrize("page", WRITTEN_BY_HAND, ids=name_of)
def test_every_column_of_a_table_has_its_name(page: Path) -> None:
    head = re.compile(r"^( *\|.*)\n *\|[ :|-]+\|$", re.MULTILINE)
    for row in head.findall(re.sub(r"`[^`\n]*`", "code", page.read_text())):
        cells = row.strip().removeprefix("|").removesuffix("|").split("|")
        assert all(cell.strip() for cell in cells), row


def test_house_words_are_found() -> None:
    text = (
        "# A\n\nThey are dealt anew.\n```\nours\n```\nIt lies behind a firewall, behind 4k keys.\n"
    )
    assert [x.split(" (")[0] for x in house_words(text)] == [
        "line 3: anew",
        "line 3: dealt",
        "line 7: behind",
    ]


def test_contributing_has_the_list() -> None:
    section = (ROOT / "CONTRIBUTING.md").read_text().split("## How we write")[1].split("\n## ")[0]
    assert "tests/project/test_words.py" in section
