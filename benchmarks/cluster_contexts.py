# SPDX-License-Identifier: BSD-3-Clause
"""What bench_contexts.py says about tree and ring: notes, ratios and the picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tree_attention.bench.report import Report

from .cluster_table import error_sentence, link_sentences

TREE, RING = "auto", "ring"

NOTES = (
    "A row is named link, p ranks, batch B, n keys per rank: 32 query and 8 key heads of 128, "
    "bf16, one query token. A call takes from the last rank's start to the last rank's end, which "
    "all read from one clock. The ways of a row take turns; median, p10 and p90 of so many calls. "
    "Rows without ms are predicted only.",
    "Computing a shard's attention takes the time that one thread of this machine needed, asleep, "
    "as all ranks share few processors; states come from a formula, against which every result is "
    "checked. What travels is real: from 256k keys on, keys and values are sent from the same "
    "memory and received into two.",
    "auto is tree_decode's default strategy, with what `python -m tree_attention calibrate` "
    "measured on the same configuration just before; predicted is the cost model with that. The "
    "ring hides computing behind its transfers, or these behind computing.",
    "Bytes and rounds (collectives and rounds of messages) are counted on the rank that has most, "
    "and equal the formulas, or the row is WRONG; wire is what left the host's devices. Gb/s is of "
    "all ranks together: all packets go through one process of this machine, which ends at some "
    "Gb/s, so the rings of many ranks on a LAN are slower here than on such a network.",
)


def summary(rows: Sequence[dict[str, Any]], measured: dict[str, Any]) -> list[str]:
    sentences = link_sentences(measured)
    sentences += error_sentence(rows, "predicted_seconds", "the prediction")
    for name in measured:
        of_this = sorted(
            (row for row in rows if f"{row['link']}/{row['world_size']}" == name),
            key=lambda row: row["keys"],
        )
        times = ", ".join(
            f"{ratio_of(row):.1f} at {row['keys']:,}" + (" (predicted)" * is_predicted(row))
            for row in of_this
        )
        sentences.append(f"{name}: ring / tree by keys per rank: {times}; {_crossover(of_this)}")
    return sentences


def seconds_of(way: dict[str, Any]) -> float:
    return way["median"] if "median" in way else way["predicted_seconds"]


def ratio_of(row: dict[str, Any]) -> float:
    return seconds_of(row["ways"][RING]) / seconds_of(row["ways"][TREE])


def is_predicted(row: dict[str, Any]) -> bool:
    return bool(row.get("only_predicted"))


def _crossover(rows: Sequence[dict[str, Any]]) -> str:
    """From which of the contexts, in order of length, the tree is faster."""
    slower = [row["keys"] for row in rows if ratio_of(row) <= 1.0]
    if not slower:
        return f"the tree is faster at all of them, also the shortest, {rows[0]['keys']:,}"
    if slower[-1] == rows[-1]["keys"]:
        return "the ring is faster at the longest"
    return f"the tree is faster above {slower[-1]:,}"


def draw(report: Report, path: Path) -> None:
    """For each link: times of the largest world by context; and the ratio, for every world."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    links = list(dict.fromkeys(row["link"] for row in report.rows))
    figure, axes = pyplot.subplots(2, len(links), figsize=(7 * len(links), 9), squeeze=False)
    for above, below, link in zip(*axes, links, strict=True):
        rows = sorted(
            (row for row in report.rows if row["link"] == link), key=lambda row: row["keys"]
        )
        worlds = sorted({row["world_size"] for row in rows})
        _draw_times(above, [row for row in rows if row["world_size"] == worlds[-1]])
        above.set_title(f"{link}, {worlds[-1]} ranks; hollow: predicted only", fontsize=10)
        for i, world in enumerate(worlds):
            points = [row for row in rows if row["world_size"] == world]
            below.plot(*_points(points), "-", color=f"C{i}", label=f"{world} ranks")
            for predicted in (False, True):
                some = [row for row in points if is_predicted(row) == predicted]
                below.plot(*_points(some), "o", color=f"C{i}", mfc=_fill(predicted, f"C{i}"))
        below.axhline(1.0, color="k", linewidth=0.6)
        below.set(xscale="log", yscale="log", xlabel="keys per rank", ylabel="ring / tree")
        below.set_title(f"{link}: how many times as fast the tree is", fontsize=10)
        for axis in (above, below):
            axis.set_xscale("log", base=2)
            axis.legend(fontsize=8)
            axis.grid(alpha=0.3)
    figure.suptitle(f"{report.title}\n{report.environment['cpu']}", fontsize=11)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _draw_times(axes: Any, rows: Sequence[dict[str, Any]]) -> None:
    for i, name in enumerate(rows[0]["ways"] if rows else ()):
        color = f"C{i}"
        model = [row for row in rows if row["ways"][name]["predicted_seconds"] is not None]
        predicted = [1e3 * row["ways"][name]["predicted_seconds"] for row in model]
        axes.plot([row["keys"] for row in model], predicted, ":", color=color)
        only = [row for row in rows if is_predicted(row)]
        times = [1e3 * row["ways"][name]["predicted_seconds"] for row in only]
        axes.plot([row["keys"] for row in only], times, "o", color=color, mfc="none")
        measured = [row for row in rows if not is_predicted(row)]
        ways = [row["ways"][name] for row in measured]
        axes.errorbar(
            [row["keys"] for row in measured],
            [1e3 * way["median"] for way in ways],
            [
                [1e3 * (way["median"] - way["p10"]) for way in ways],
                [1e3 * (way["p90"] - way["median"]) for way in ways],
            ],
            fmt="o-",
            color=color,
            label="tree" if name == TREE else name,
        )
    axes.set(yscale="log", xlabel="keys per rank", ylabel="ms per step (dotted: model)")


def _points(rows: Sequence[dict[str, Any]]) -> tuple[list[int], list[float]]:
    return [row["keys"] for row in rows], [ratio_of(row) for row in rows]


def _fill(predicted: bool, color: str) -> str:
    return "none" if predicted else color
