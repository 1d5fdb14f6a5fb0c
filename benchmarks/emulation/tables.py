# SPDX-License-Identifier: BSD-3-Clause
"""The columns of tables of ways that were timed on emulated clusters, and sentences about links."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ..harness.report import Column

PREDICTIONS = {
    "predicted_seconds": "off by",
    "modelled_seconds": "constants alone",
    "extrapolated_seconds": "from 4 ranks",
}


def columns(
    rows: Sequence[dict[str, Any]], predictions: dict[str, str] = PREDICTIONS
) -> list[Column]:
    """`predictions`: headings of the columns that tell how far off they are."""
    lines = [(row, name, way) for row in rows for name, way in row["ways"].items()]

    def column(heading: str, text: Callable[[dict[str, Any], str, dict[str, Any]], str]) -> Column:
        return Column(heading, [text(*line) for line in lines])

    def right(row: dict[str, Any], way: dict[str, Any]) -> str:
        if "seconds" not in way:
            return "-"
        counted = way["bytes"], way["rounds"]
        as_formula = counted == (way["formula_bytes"], way["formula_rounds"])
        return "yes" if way["right"] and as_formula else "WRONG"

    return [
        column("case", lambda row, name, way: row["name"]),
        column("way", lambda row, name, way: title(name, way)),
        column("ms", lambda row, name, way: milliseconds(way.get("median"))),
        column("p10 to p90", lambda row, name, way: _spread(way)),
        column("predicted ms", lambda row, name, way: milliseconds(way["predicted_seconds"])),
        *(column(heading, partial(_error_of, kind)) for kind, heading in predictions.items()),
        column("bytes sent", lambda row, name, way: _number(_counted(way, "bytes"))),
        column("wire bytes", lambda row, name, way: _number(way.get("wire_bytes"))),
        column("rounds", lambda row, name, way: _number(_counted(way, "rounds"))),
        column("Gb/s", lambda row, name, way: _rate(row, way)),
        column("right", lambda row, name, way: right(row, way)),
    ]


def title(name: str, way: dict[str, Any]) -> str:
    """A way, and for auto what it chose."""
    return f"{name}: {way['chosen']}" if "chosen" in way else name


def milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:,.2f}"


def errors(ways: Sequence[dict[str, Any]], prediction: str) -> list[float]:
    """Of the predictions that there are, relative to what was measured."""
    return [
        abs(way[prediction] / way["median"] - 1)
        for way in ways
        if way[prediction] is not None and "median" in way
    ]


def error_sentence(rows: Sequence[dict[str, Any]], prediction: str, origin: str) -> list[str]:
    """Nothing where there are no predictions."""
    ways = [way for row in rows for way in row["ways"].values()]
    off = errors(ways, prediction)
    if not off:
        return []
    return [
        f"{origin} is off by {statistics.median(off):.0%} in the median of {len(off)} predictions, "
        f"{sum(error <= 0.2 for error in off)} of them by at most 20 %"
    ]


def link_sentences(measured: dict[str, Any]) -> list[str]:
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


def _spread(way: dict[str, Any]) -> str:
    if "median" not in way:
        return "-"
    return f"{milliseconds(way['p10'])} to {milliseconds(way['p90'])} ({len(way['seconds'])})"


def _error_of(kind: str, row: dict[str, Any], name: str, way: dict[str, Any]) -> str:
    return _error(way, kind)


def _error(way: dict[str, Any], prediction: str) -> str:
    if way[prediction] is None or "median" not in way:
        return "-"
    return f"{100 * (way[prediction] / way['median'] - 1):+.0f} %"


def _counted(way: dict[str, Any], name: str) -> int:
    """What the formula says where nothing was measured."""
    return way.get(name, way[f"formula_{name}"])


def _number(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def _rate(row: dict[str, Any], way: dict[str, Any]) -> str:
    """Of all ranks together."""
    if "median" not in way:
        return "-"
    return f"{8e-9 * row['world_size'] * way['bytes'] / way['median']:.2f}"
