# SPDX-License-Identifier: BSD-3-Clause
"""What the programs of lab/papers/README.md compute, and what benchmarks/results has of them."""

import re
from functools import cache
from typing import Any

from benchmarks.harness.report import Report
from benchmarks.harness.results import number, read_table
from lab.papers.__main__ import FIGURES

Words = list[str]
MINUS, TIMES = "\N{MINUS SIGN}", "\N{MULTIPLICATION SIGN}"


@cache
def report(name: str) -> Report:
    return FIGURES[name]()


@cache
def rows(name: str) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in report(name).rows}


def cells(name: str, heading: str) -> list[str]:
    """The column of a printed figure."""
    (found,) = (column.values for column in report(name).columns if column.heading == heading)
    return list(found)


def result(file: str, column: str, **wanted: str) -> float:
    """A cell of benchmarks/results/FILE.md, of the only row with these cells."""
    found = [x for x in read_table(file).rows if wanted.items() <= x.items()]
    assert len(found) == 1, f"{file}.md has {len(found)} rows with {wanted}"
    return number(found[0][column])


def listed(values: list[float], digits: int = 2) -> str:
    return ", ".join(f"{value:,.{digits}f}" for value in values)


def summary(name: str, pattern: str) -> tuple[str, ...]:
    """The groups of a pattern in the sentences under a figure."""
    found = re.search(pattern, " ".join(report(name).summary))
    assert found, f"{name} does not say {pattern}"
    return found.groups()
