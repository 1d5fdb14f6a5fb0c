# SPDX-License-Identifier: BSD-3-Clause
"""A published table or figure beside what this repository computes: one report for all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..harness.report import Report, columns_of, environment

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
