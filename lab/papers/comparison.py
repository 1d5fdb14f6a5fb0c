# SPDX-License-Identifier: BSD-3-Clause
"""A published table or figure beside what this repository computes: one report for all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.harness.report import Report, columns_of, environment

Row = dict[str, Any]


def comparison(
    name: str,
    title: str,
    rows: Sequence[Row],
    columns: Mapping[str, Callable[[Row], str]],
    notes: Sequence[str],
    summary: Sequence[str] = (),
) -> Report:
    """Rows have a "name"."""
    rows = [{"wrong": False, "published": None, "ours": None, **row} for row in rows]
    return Report(
        name=name,
        title=title,
        notes=notes,
        environment=environment(),
        rows=rows,
        columns=columns_of(rows, {"case": lambda row: row["name"], **columns}),
        summary=list(summary),
    )


def number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def published_and_ours(report: Report) -> str:
    """The first number that the paper gives beside ours, and how far apart all of them are."""
    rows = [row for row in report.rows if row["published"] is not None]
    if not rows:
        return f"{report.title}. The paper gives no number"
    first, ratios = rows[0], [row["ours"] / row["published"] for row in rows]
    numbers = f"published {_short(first['published'])}, ours {_short(first['ours'])}"
    text = f"{report.title}. {numbers} for {first['name']}"
    if len(rows) == 1:
        return text
    return f"{text}; of {len(rows)} numbers ours is {min(ratios):.2f} to {max(ratios):.2f} times"


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
