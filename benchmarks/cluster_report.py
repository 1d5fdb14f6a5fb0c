# SPDX-License-Identifier: BSD-3-Clause
"""Tables, sentences and the picture of bench_cluster.py."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tree_attention.bench.report import Column, Report

from .cluster_rank import RINGS

NOTES = (
    "A row is named link, p ranks, batch B, n keys per rank and sequence: 32 query and 8 key heads "
    "of 128, bf16, one query token. A call takes from the last rank's start to the last rank's "
    "end, which all read from one clock; median, p10 and p90 of 5 to 30 calls.",
    "The attention itself is not computed, its states come from a formula, against which every "
    "result is checked; where rows compare contexts, it takes the time that one thread of this "
    "machine needed, asleep, as all ranks share few processors. What travels is real.",
    "predicted: the cost model of strategy auto, with constants that `calibrate` fitted on 4 ranks "
    "of lan and of metro; two-level has those of lan inside nodes and of metro between them. "
    "The ring hides computing behind its transfers, or these behind computing.",
    "Bytes and rounds (collectives and rounds of messages) are counted on the rank that has most, "
    "and equal the formulas, or the row is WRONG; wire is what left the host's devices, with "
    "headers and acknowledgements. Gb/s is of all ranks together: all packets go through one "
    "process of this machine, which ends at some Gb/s, so that large messages of many ranks are "
    "slower here than on such a network.",
)


def columns(rows: Sequence[dict[str, Any]]) -> list[Column]:
    lines = [(row, name, way) for row in rows for name, way in row["ways"].items()]

    def column(heading: str, text: Callable[[dict[str, Any], str, dict[str, Any]], str]) -> Column:
        return Column(heading, [text(*line) for line in lines])

    def error(way: dict[str, Any]) -> str:
        if way["predicted_seconds"] is None:
            return "-"
        return f"{100 * (way['predicted_seconds'] / way['median'] - 1):+.0f} %"

    def right(row: dict[str, Any], way: dict[str, Any]) -> str:
        counted = way["bytes"], way["rounds"]
        as_formula = counted == (way["formula_bytes"], way["formula_rounds"])
        return "yes" if way["right"] and as_formula else "WRONG"

    return [
        column("case", lambda row, name, way: row["name"]),
        column("way", lambda row, name, way: name),
        column("ms", lambda row, name, way: milliseconds(way["median"])),
        column(
            "p10 to p90",
            lambda row, name, way: f"{milliseconds(way['p10'])} to {milliseconds(way['p90'])}",
        ),
        column("predicted ms", lambda row, name, way: milliseconds(way["predicted_seconds"])),
        column("off by", lambda row, name, way: error(way)),
        column("bytes sent", lambda row, name, way: f"{way['bytes']:,}"),
        column("wire bytes", lambda row, name, way: f"{way['wire_bytes']:,}"),
        column("rounds", lambda row, name, way: str(way["rounds"])),
        column(
            "Gb/s",
            lambda row, name, way: f"{8e-9 * row['world_size'] * way['bytes'] / way['median']:.2f}",
        ),
        column("right", lambda row, name, way: right(row, way)),
    ]


def milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:,.2f}"


def errors(rows: Sequence[dict[str, Any]]) -> list[float]:
    return [
        abs(way["predicted_seconds"] / way["median"] - 1)
        for row in rows
        for way in row["ways"].values()
        if way["predicted_seconds"] is not None
    ]


def summary(rows: Sequence[dict[str, Any]], measured: dict[str, Any]) -> list[str]:
    sentences = []
    for name, part in measured.items():
        for link in part["links"]:
            rtt, rate = link["round_trip_ms"], link["gbit_per_second"]
            sentences.append(
                f"{name}, link {link['link']}: round trip {rtt[1]:.3f} ms ({rtt[0]:.3f} to "
                f"{rtt[2]:.3f}), one bulk transfer {rate[1]:.2f} Gb/s ({rate[0]:.2f} to "
                f"{rate[2]:.2f})"
            )
    if off := errors(rows):
        sentences.append(
            f"the model is off by {statistics.median(off):.0%} in the median of {len(off)} "
            f"predictions, {sum(e <= 0.2 for e in off)} of them by at most 20 %"
        )
    for row in rows:
        ways = row["ways"]
        if row["part"] == "context":
            tree = min(way["median"] for name, way in ways.items() if name not in RINGS)
            ratios = ", ".join(f"{name} {ways[name]['median'] / tree:.2f}" for name in RINGS)
            sentences.append(f"{row['name']}: times of the tree's: {ratios}")
        else:
            sentences.append(_choice(row))
    return sentences


# Whose bits agree, among which auto chooses.
CANONICAL = ("all_gather", "two_phase", "hierarchical", "butterfly")


def _choice(row: dict[str, Any]) -> str:
    ways = row["ways"]
    best = min(CANONICAL, key=lambda name: ways[name]["median"])
    slowest = ways["three_allreduce"]["median"] / ways[best]["median"]
    text = f"{row['name']}: {best} is fastest, {slowest:.1f} times as fast as three_allreduce"
    if ways[best]["predicted_seconds"] is None:
        return text
    auto = min(CANONICAL, key=lambda name: ways[name]["predicted_seconds"])
    return f"{text}; auto takes {auto}, {ways[auto]['median'] / ways[best]['median']:.2f} times it"


def draw(report: Report, path: Path) -> None:
    """Measured against predicted times; and times by context for the largest world."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    links = list(dict.fromkeys(row["link"] for row in report.rows))
    figure, (top, bottom) = pyplot.subplots(
        2, len(links), figsize=(5 * len(links), 9), squeeze=False
    )
    for above, below, link in zip(top, bottom, links, strict=True):
        rows = [row for row in report.rows if row["link"] == link]
        names = dict.fromkeys(name for row in rows for name in row["ways"])
        limits: list[float] = []
        for name in names:
            points = [
                (1e3 * way["predicted_seconds"], 1e3 * way["median"])
                for row in rows
                if (way := row["ways"].get(name)) and way["predicted_seconds"] is not None
            ]
            if points:
                above.plot(*zip(*points, strict=True), ".", label=name)
            limits += [value for point in points for value in point]
        if limits:
            ends = [min(limits), max(limits)]
            above.plot(ends, ends, "k-", linewidth=0.6)
            above.fill_between(
                ends, [0.8 * x for x in ends], [1.2 * x for x in ends], alpha=0.1, color="k"
            )
            above.legend(fontsize=7)
        above.set(xscale="log", yscale="log", xlabel="predicted ms", ylabel="measured ms")
        above.set_title(f"{link}: every row; band: 20 %", fontsize=10)
        world = max(row["world_size"] for row in rows)
        chosen = [r for r in rows if r["part"] == "context" and r["world_size"] == world]
        for name in chosen[0]["ways"] if chosen else ():
            ways = [row["ways"][name] for row in chosen]
            keys = [row["keys"] for row in chosen]
            medians = [1e3 * way["median"] for way in ways]
            spreads = [
                [1e3 * (way["median"] - way["p10"]) for way in ways],
                [1e3 * (way["p90"] - way["median"]) for way in ways],
            ]
            drawn = below.errorbar(keys, medians, spreads, marker="o", markersize=3, label=name)
            if all(way["predicted_seconds"] is not None for way in ways):
                predicted = [1e3 * way["predicted_seconds"] for way in ways]
                below.plot(keys, predicted, ":", color=drawn[0].get_color())
        below.set(xscale="log", yscale="log", xlabel="keys per rank", ylabel="ms per step")
        below.set_title(f"{link}, {world} ranks; dotted: predicted", fontsize=10)
        if chosen:
            below.legend(fontsize=7)
    figure.suptitle(f"{report.title}\n{report.environment['cpu']}", fontsize=11)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
