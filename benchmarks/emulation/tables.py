# SPDX-License-Identifier: BSD-3-Clause
"""Columns, and sentences about links, for all reports of emulated clusters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..harness.report import Column, columns_of


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


def milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:,.2f}"


def spread_of(method: dict[str, Any]) -> str:
    low, high = milliseconds(method["p10"]), milliseconds(method["p90"])
    return f"{low} to {high} ({len(method['seconds'])})"


def link_sentences(measured: dict[str, Any]) -> list[str]:
    """Describe the measured links of each configuration, median and spread."""
    sentences = []
    for name, part in measured.items():
        for link in part["links"]:
            rtt, rate = link["round_trip_ms"], link["gbit_per_second"]
            sentences.append(
                f"{name}, link {link['link']}: round trip {rtt[1]:.3f} ms ({rtt[0]:.3f} to "
                f"{rtt[2]:.3f}), one bulk transfer {rate[1]:.2f} Gb/s ({rate[0]:.2f} to "
                f"{rate[2]:.2f})"
            )
    return sentences
