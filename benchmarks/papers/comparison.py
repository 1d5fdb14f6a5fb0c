# SPDX-License-Identifier: BSD-3-Clause
"""A published table or figure beside what this repository computes: one report for all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ..harness.plots import picture
from ..harness.report import Report, columns_of, environment

Row = dict[str, Any]


def comparison(
    name: str,
    title: str,
    rows: Sequence[Row],
    columns: Mapping[str, Callable[[Row], str]],
    notes: Sequence[str],
    summary: Sequence[str] = (),
    *,
    shown: str,
) -> Report:
    """Rows have a "name". Their "published" and "ours", None for nothing, are what the picture
    shows: `shown`, with the unit."""
    rows = [{"wrong": False, "published": None, "ours": None, **row} for row in rows]
    return Report(
        name=name,
        title=title,
        notes=notes,
        environment=environment(),
        rows=rows,
        columns=columns_of(rows, {"case": lambda row: row["name"], **columns}),
        summary=list(summary),
        draw=partial(draw, shown),
    )


def draw(shown: str, report: Report, path: Path) -> None:
    """Published and ours, a pair of bars for each row; nothing published: one bar, from zero."""
    size = (9, 1.4 + 0.3 * len(report.rows))
    with picture(path, size, title=report.title) as ((axes,),):
        for place, key in ((-0.2, "published"), (0.2, "ours")):
            bars = [(i + place, row[key]) for i, row in enumerate(report.rows) if row[key]]
            if bars:
                axes.barh(*zip(*bars, strict=True), 0.4, label=key)
        names = [row["name"] for row in report.rows]
        axes.set_yticks(range(len(names)), names, fontsize=8)
        axes.invert_yaxis()
        axes.set_xlabel(shown)
        if any(row["published"] for row in report.rows):
            axes.set_xscale("log")
            axes.legend(fontsize=8)
        axes.grid(axis="x", alpha=0.3)


def number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"
