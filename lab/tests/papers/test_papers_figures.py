# SPDX-License-Identifier: BSD-3-Clause
"""lab/papers/README.md says what its programs compute and what benchmarks/results has.

`paper_words_*.py` have for the entries of the page the words that hold their numbers, made of those
results. A number of a result that stands in no such words fails, and so do words that the page
does not have.
"""

import re
from pathlib import Path

import pytest

import paper_words_lean
import paper_words_slides
import paper_words_tree
from benchmarks.harness.results import number, read_table
from lab.papers import lean
from lab.simulation import RING
from paper_results import Words
from tiers import tiers

PAGE = (Path(__file__).parents[3] / "lab/papers/README.md").read_text()
TITLES = re.findall(r"^- \*\*((?:[^*]|\n)*)\*\*", PAGE, re.MULTILINE)
# What is no figure: places in the papers, tolerances, formulas, and names.
NO_FIGURE = re.compile(
    r"\[[^\]]*\]\([^)]*\)|`[^`]*`|\b1e-12\b"
    r"|\b(?:Eq\.|[Ll]ines?|Algorithms?|Figures?|Tables?|Appendix|[Ss]ection|Theorem|head) "
    r"\d[\d.]*(?:(?:,| to| and|, and) \d[\d.]*)*|O\(1e-\d\)"
    r"|\b\d+ ?\(?[A-Za-zΘ](?![A-Za-z0-9])(?: ?[-\u2212] ?1)?|\b[a-zP] ?[-\u2212] ?1"
    r"|(?:Llama|RTX|OPT) [\d.]+B?|(?:GPT|FlashAttention)-2"
)
NUMBER = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?![\w.]*[A-Za-z0-9])")
SAYS = {**paper_words_tree.SAYS, **paper_words_lean.SAYS, **paper_words_slides.SAYS}


def plain(text: str) -> str:
    return " ".join(text.split())


def results_of(page: str) -> dict[str, str]:
    """The result of every entry, by its title."""
    found = re.findall(
        r"^- \*\*((?:[^*]|\n)*)\*\*:\n(?:  - .*\n|    .*\n)*?  - result: (.*(?:\n    \S.*)*)",
        page,
        re.MULTILINE,
    )
    return {plain(title): plain(text) for title, text in found}


RESULTS = results_of(PAGE)
# Those that take seconds to compute.
SIMULATED = [
    x
    for x in RESULTS
    if x.startswith(("Algorithm 3: three", "Average of the", "Figure 3: latency", "Figure 7:"))
]


def unsaid(text: str, words: Words) -> list[str]:
    """What is wrong with a result: words that it lacks, and numbers outside of all words."""
    wrong = [one for one in words if one not in text]
    for one in words:
        text = text.replace(one, "")
    return wrong + NUMBER.findall(NO_FIGURE.sub("", text))


def test_titles_are_read() -> None:
    assert len(RESULTS) == len(TITLES) > 50
    for beginning in SAYS:
        assert sum(title.startswith(beginning) for title in RESULTS) == 1, beginning


@pytest.mark.parametrize("title", tiers([x for x in RESULTS if x not in SIMULATED], SIMULATED))
def test_result_says_what_was_found(title: str) -> None:
    found = [make() for beginning, make in SAYS.items() if title.startswith(beginning)]
    assert not unsaid(RESULTS[title], [one for words in found for one in words])


def test_a_stale_number_is_found() -> None:
    text = "Ours: 2.44 (Eq. 10, O(1e-5) s, 4 N d, H100) and 1,297 in all"
    assert not unsaid(text, ["2.44", "1,297 in all"])
    assert unsaid(text, ["2.44"]) == ["1,297"]
    assert unsaid(text, ["2.45", "1,297"]) == ["2.45", "2.44"]


def test_share_of_a_lone_block() -> None:
    assert f"({lean.LONE}, fitted to seven of the speedups" in plain(PAGE)
    assert len(lean.KNOWN) == 7


def test_memory_that_was_measured_is_that_of_the_formula() -> None:
    """Resident and allocated bytes of every ring of benchmarks/results/memory.md."""
    table = [row for row in read_table("memory").rows if row["method"] == RING]
    assert len(table) >= 10
    for row in table:
        for column in ("allocated bytes", "resident bytes"):
            assert number(row[column]) == pytest.approx(number(row["formula"]), rel=0.01), row
