# SPDX-License-Identifier: BSD-3-Clause
"""Columns of all reports of emulated clusters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.harness.places import milliseconds
from benchmarks.harness.report import Column, columns_of


def columns(rows: Sequence[dict[str, Any]]) -> list[Column]:
    """Columns of a table whose rows have methods that were timed and counted."""
    lines = [(row, name, method) for row in rows for name, method in row["methods"].items()]

    def right(method: dict[str, Any]) -> str:
        as_formula = method["bytes"] == method["formula_bytes"]
        return "yes" if method["right"] and as_formula else "WRONG"

    def rate(row: dict[str, Any], method: dict[str, Any]) -> str:
        return f"{8e-9 * row['world_size'] * method['bytes'] / method['median']:.2f}"

    return columns_of(
        lines,
        {
            "case": lambda row, name, method: row["name"],
            "method": lambda row, name, method: title(name, method),
            "ms": lambda row, name, method: milliseconds(method["median"]),
            "p10 to p90": lambda row, name, method: spread_of(method),
            "bytes sent": lambda row, name, method: f"{method['bytes']:,}",
            "wire bytes": lambda row, name, method: f"{method['wire_bytes']:,}",
            "rounds": lambda row, name, method: str(method["rounds"]),
            "Gb/s": lambda row, name, method: rate(row, method),
            "right": lambda row, name, method: right(method),
        },
    )


def title(name: str, method: dict[str, Any]) -> str:
    """A method, and for auto what it chose."""
    return f"{name}: {method['chosen']}" if "chosen" in method else name


def spread_of(method: dict[str, Any]) -> str:
    low, high = milliseconds(method["p10"]), milliseconds(method["p90"])
    return f"{low} to {high} ({len(method['seconds'])})"
