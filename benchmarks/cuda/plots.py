# SPDX-License-Identifier: BSD-3-Clause
"""The picture: bandwidth against context, ragged batches, ablations."""

from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..harness.plots import picture
from ..harness.report import Report
from .cases import CAPACITY, CONTEXT, HEADS, OURS, QUERIES, RAGGED, UNIFORM
from .merge import SECTION as MERGE
from .peers import ABLATIONS
from .rows import PROBE, ratio
from .tables import HEADINGS

Row = Mapping[str, Any]
IN_ORDER = (OURS, *HEADINGS)
COLOURS = {name: f"C{i}" for i, name in enumerate(IN_ORDER)} | {PROBE: "black"}


def draw(report: Report, path: Path) -> None:
    rows = [row for row in report.rows if row["times"] and row["section"] != MERGE]
    title = f"{report.title}, {report.environment['read ceiling']} read"
    with picture(path, (11, 16), (3, 1), title, height_ratios=(5, 6, 5)) as ((a,), (b,), (c,)):
        _bandwidth(a, rows)
        _bars(b, [row for row in rows if row["section"] in (RAGGED, UNIFORM, CAPACITY)])
        _ablations(c, rows)


def _bandwidth(axes: Any, rows: Sequence[Row]) -> None:
    """One sequence of 32/8 heads: every implementation over the length."""
    lines: dict[str, dict[int, float]] = {}
    for row in rows:
        case = row["case"]
        one = len(case["lengths"]) == 1 and case["dtype"] == "bf16" and case["head_dim"] == 128
        if row["section"] not in (CONTEXT, HEADS) or not one or tuple(case["heads"]) != (32, 8):
            continue
        for name, times in row["times"].items():
            moved = row["read_bytes"] if name == PROBE else row["io_bytes"]
            lines.setdefault(name, {})[case["lengths"][0]] = moved / times["median_us"] / 1e3
    for name in _in_order(lines):
        style = {"linestyle": "--"} if name == PROBE else {"marker": "o", "markersize": 3}
        points = zip(*sorted(lines[name].items()), strict=True)
        axes.plot(*points, label=name, color=COLOURS[name], **style)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("keys")
    axes.set_ylabel("GB/s")
    axes.set_title("One sequence, 32/8 heads, head_dim 128, bf16", fontsize=10, loc="left")
    axes.grid(alpha=0.3)
    _legend(axes)


def _bars(axes: Any, rows: Sequence[Row]) -> None:
    """Bandwidth of every implementation in each row."""
    names = _in_order({name for row in rows for name in row["times"]})
    height = 0.8 / max(1, len(names))
    for position, name in enumerate(names):
        with_it = [(i, row) for i, row in enumerate(rows) if name in row["times"]]
        axes.barh(
            [i + (position - (len(names) - 1) / 2) * height for i, _ in with_it],
            [
                (row["read_bytes"] if name == PROBE else row["io_bytes"])
                / row["times"][name]["median_us"]
                / 1e3
                for _, row in with_it
            ],
            height,
            label=name,
            color=COLOURS[name],
        )
    axes.set_yticks(range(len(rows)), [row["name"] for row in rows], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("GB/s of the keys that are there")
    axes.set_title("Ragged batches, as many bytes in one length, capacity", fontsize=10, loc="left")
    axes.grid(axis="x", alpha=0.3)
    _legend(axes)


def _ablations(axes: Any, rows: Sequence[Row]) -> None:
    """Time relative to ours; the dozen rows where a variant loses most, and those of queries."""
    variants = tuple(ABLATIONS.values())
    ratios = {
        row["name"]: {name: q for name in variants if (q := ratio(row, name)) is not None}
        for row in rows
        if OURS in row["times"]
    }
    names = sorted(
        (name for name, found in ratios.items() if found),
        key=lambda name: -max(ratios[name].values()),
    )[:12]
    names += [
        row["name"]
        for row in rows
        if row["section"] == QUERIES and row["name"] not in names and ratios.get(row["name"])
    ]
    for position, variant in enumerate(variants):
        with_it = [(i, name) for i, name in enumerate(names) if variant in ratios[name]]
        axes.barh(
            [i + (position - 0.5) * 0.4 for i, _ in with_it],
            [ratios[name][variant] for _, name in with_it],
            0.4,
            label=variant,
            color=COLOURS[variant],
        )
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_yticks(range(len(names)), names, fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("time / time of lean_decode" if names else "the ablations are not built")
    axes.set_title("Other schedules of the same inner loop", fontsize=10, loc="left")
    axes.grid(axis="x", alpha=0.3)
    _legend(axes)


def _legend(axes: Any) -> None:
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))


def _in_order(names: Container[str]) -> list[str]:
    return [name for name in COLOURS if name in names]
