# SPDX-License-Identifier: BSD-3-Clause
"""Read the tables of benchmarks/results back, and mark pictures with what they show."""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results"


@dataclass(frozen=True)
class Table:
    """The table of a result in Markdown, and the notes under it."""

    rows: list[dict[str, str]]
    notes: list[str]


def read_table(name: str) -> Table:
    """Parse `benchmarks/results/NAME.md`."""
    lines = (RESULTS / f"{name}.md").read_text().splitlines()
    cells = [
        [cell.strip() for cell in line.strip().strip("|").split(" | ")]
        for line in lines
        if line.startswith("|")
    ]
    heading, rows = cells[0], cells[2:]
    return Table(
        [dict(zip(heading, row, strict=True)) for row in rows],
        [line[2:] for line in lines if line.startswith("- ")],
    )


def number(text: str) -> float:
    """Return the first number of a cell: 1234.5 of "1,234.5 (1,300.0)"."""
    found = re.match(r"[\d,]+\.?\d*", text)
    if found is None:
        raise ValueError(f"a number is expected, got {text!r}")
    return float(found[0].replace(",", ""))


def value(file: str, row: Mapping[str, str], column: str, unit: float = 1) -> float:
    """Return a cell of `benchmarks/results/FILE.md`, of the only row with these cells."""
    found = [x for x in read_table(file).rows if row.items() <= x.items()]
    if len(found) != 1:
        raise ValueError(f"{file}.md must have one row with {row}, got {len(found)}")
    return number(found[0][column]) / unit


def digest(data: Any) -> str:
    """Return a digest of what a picture shows."""
    return hashlib.sha256(json.dumps(data).encode()).hexdigest()[:16]
