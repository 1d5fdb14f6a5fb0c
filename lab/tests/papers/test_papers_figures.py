# SPDX-License-Identifier: BSD-3-Clause
"""The numbers of lab/papers/README.md are those that its programs and benchmarks/results have.

A comment behind a result or a paragraph names them in the order of the text, and those that are
given: published ones, sizes, tolerances. Words are free.
"""

import re
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.harness.results import number, read_table
from lab.papers import lean
from lab.papers.values import VALUES, main
from lab.simulation import RING
from tiers import tiers

PAGE = (Path(__file__).parents[3] / "lab/papers/README.md").read_text()
# What is no figure: places in the papers, tolerances, formulas, and names.
NO_FIGURE = re.compile(
    r"\[[^\]]*\]\([^)]*\)|`[^`]*`|\b1e-12\b"
    r"|\b(?:Eq\.|[Ll]ines?|Algorithms?|Figures?|Tables?|Appendix|[Ss]ection|Theorem|head) "
    r"\d[\d.]*(?:(?:,| to| and|, and) \d[\d.]*)*|O\(1e-\d\)"
    r"|(?<![\w.])\d+ ?\(?[A-Za-zΘ](?![A-Za-z0-9])(?: ?[-\u2212] ?1)?|\b[a-zP] ?[-\u2212] ?1"
    r"|(?:Llama|RTX|OPT) [\d.]+B?|(?:GPT|FlashAttention)-2"
)
NUMBER = re.compile(
    r"(?:(?<=\s)[+\u2212])?(?<![\w.])\d[\d,]*(?:\.\d+)?(?:e-\d+)?(?![\w.]*[A-Za-z0-9])"
)
COMMENT = re.compile(r"<!--\s+(?:values: ([\w\s]+))?(?:given: ([^>]*))?-->")


def numbers(text: str) -> list[str]:
    without_links = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", COMMENT.sub("", text))
    found = NUMBER.findall(NO_FIGURE.sub("", " ".join(without_links.split())))
    return [x.rstrip(",") for x in found]


def difference(text: str, values: list[str], given: list[str]) -> str:
    """What is wrong with a text that has `values` in this order, and `given` between them."""
    rest = []
    expected = iter([*values, ""])
    following = next(expected)
    for found in numbers(text):
        if found == following:
            following = next(expected)
        else:
            rest.append(found)
    if following:
        return f"{following} of {values} is not there, in this order; the text has {rest} too"
    unbound, gone = Counter(rest) - Counter(given), Counter(given) - Counter(rest)
    return f"not bound: {[*unbound]}, given and not there: {[*gone]}" if unbound or gone else ""


def parts() -> dict[str, str]:
    """Paragraphs with a comment, and the results of all entries, by their beginning."""
    found, title = {}, ""
    for part in re.split(r"\n\n|\n(?=- \*\*)|\n(?=  - )", PAGE):
        if part.startswith("- **"):
            title = part.split("**")[1]
        if part.startswith("  - result: "):
            found[" ".join(title.split())] = part
        elif COMMENT.search(part):
            found[part[:40]] = part
    return found


PARTS = parts()
# Those that take seconds to compute.
SLOW = ("Algorithm 3: three", "Average of the", "Figure 3: latency", "Figure 7:", "Figures. By")
SIMULATED = [x for x in PARTS if x.startswith(SLOW)]


def bindings(part: str) -> tuple[list[str], list[str]]:
    """The names of a part's values, and the numbers that are given."""
    comments = COMMENT.findall(part)
    assert len(comments) == part.count("<!--") <= 1, part
    ((names, given),) = comments or [("", "")]
    return names.split(), [x.strip() for x in given.split(";") if x.strip()]


@pytest.mark.parametrize("title", tiers([x for x in PARTS if x not in SIMULATED], SIMULATED))
def test_numbers_are_those_that_were_found(title: str) -> None:
    names, given = bindings(PARTS[title])
    values = [value for name in names for value in VALUES[name]()]
    assert not difference(PARTS[title], values, given)


def test_every_value_is_shown_once() -> None:
    assert len(PARTS) > 50
    assert Counter(x for part in PARTS.values() for x in bindings(part)[0]) == Counter([*VALUES])


def test_a_stale_number_is_found() -> None:
    text = "Ours: 2.44 (Eq. 10, O(1e-5) s, 4 N d, H100), [5](page.md) and 1,297 in all, \u22123 %"
    assert not difference(text, ["2.44", "1,297"], ["5", "\u22123"])
    assert "2.45 of ['2.45'] is not there" in difference(text, ["2.45"], ["5"])
    assert "2.44 of" in difference(text, ["1,297", "2.44"], ["5"])  # in another order
    assert "not bound: ['5']" in difference(text, ["2.44", "1,297"], ["\u22123"])
    assert "not there: ['7']" in difference(text, ["2.44", "1,297"], ["5", "\u22123", "7"])


def test_program(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["overflow", "slow_memory"]) == 0
    assert capsys.readouterr().out == "overflow: 710\nslow_memory: 12.4, 16.1\n"
    with pytest.raises(SystemExit):
        main(["tree_table_3"])
    assert "nothing is called tree_table_3; there are overflow, " in capsys.readouterr().err


def test_what_was_counted_is_right() -> None:
    assert all(row["right"] == "yes" for row in read_table("gradient_cost").rows)
    (row,) = (x for x in read_table("algorithm_4").rows if x["schedule"] == "CorrectedLast")
    assert row["right"] == row["sizes"]
    assert len(read_table("slow_memory").rows) == 8
    assert len(lean.KNOWN) == 7


def test_memory_that_was_measured_is_that_of_the_formula() -> None:
    """Resident and allocated bytes of every ring of benchmarks/results/memory.md."""
    table = [row for row in read_table("memory").rows if row["method"] == RING]
    assert len(table) >= 10
    for row in table:
        for column in ("allocated bytes", "resident bytes"):
            assert number(row[column]) == pytest.approx(number(row["formula"]), rel=0.01), row
