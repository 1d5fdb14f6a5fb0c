# SPDX-License-Identifier: BSD-3-Clause
"""Decoding steps of every strategy and both rings on emulated clusters: needs root.

    sudo .venv/bin/python -m benchmarks.emulation.clusters --out DIR

Each configuration is calibrated first, as a user would, and strategy auto chooses by that.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tree_attention import strategies

from ..harness.measure import load_warnings
from ..harness.report import Report, environment
from .configuration import configurations, load_costs, measure, parser_of, run_cases, without_rows
from .model import AUTO, add_predictions, costs_of
from .rank import RINGS
from .tables import columns, error_sentence, link_sentences
from .wiring import LINKS

WORLDS = (2, 4, 8, 16)
EXTRAPOLATED_FROM = 4  # ranks
BATCHES = (1, 16, 64)
RING_TOKENS = 256  # of a rank's shard, all sequences together


def cases() -> list[dict[str, Any]]:
    return [
        {
            "batch": batch,
            "keys": RING_TOKENS // batch,
            "seconds_per_key": 0.0,
            "min_rounds": 5,
            "ways": [*strategies(), AUTO, *RINGS],
        }
        for batch in BATCHES
    ]


def main(arguments: list[str]) -> int:
    names = configurations(list(LINKS), WORLDS)
    parser = parser_of("clusters", "cluster", names)
    parser.add_argument(
        "--seconds", type=float, default=8.0, help="for all ways of a case (default 8)"
    )
    parsed = parser.parse_args(arguments)

    def run(link: str, world_size: int) -> dict[str, Any]:
        return run_cases(link, world_size, cases(), parsed.seconds)

    return measure("cluster", names, parsed, run, report_of)


def report_of(measured: dict[str, Any]) -> Report:
    calibrations = {name: load_costs(part["costs"]) for name, part in measured.items()}
    of_one_link = {
        LINKS[link]: calibration.costs
        for link in LINKS
        if (calibration := calibrations.get(f"{link}/{EXTRAPOLATED_FROM}")) is not None
        and LINKS[link].inside is None
    }
    rows = []
    for name, part in measured.items():
        for row in part["rows"]:
            wiring = LINKS[row["link"]]
            add_predictions(row, wiring, calibrations[name], costs_of(wiring, of_one_link))
            rows.append(row)
    return Report(
        name="cluster",
        title="Strategies and rings on emulated clusters",
        notes=NOTES,
        environment=environment(configurations=", ".join(measured)),
        rows=rows,
        columns=columns(rows),
        summary=summary(rows, measured),
        warnings=load_warnings([part["other_load"] for part in measured.values()]),
        more={"configurations": without_rows(measured)},
        draw=draw,
    )


def summary(rows: Sequence[dict[str, Any]], measured: dict[str, Any]) -> list[str]:
    choices = [choice for row in rows if (choice := choice_of(row)) is not None]
    sentences = link_sentences(measured)
    for prediction, origin in (
        ("predicted_seconds", "what auto goes by"),
        ("modelled_seconds", "the model with constants of the same configuration"),
        ("extrapolated_seconds", "the model with constants of 4 ranks"),
    ):
        sentences += error_sentence(rows, prediction, origin)
    if choices:
        near = sum(choice["ratio"] <= 1.1 for choice in choices)
        equal = sum(choice["ratio"] <= 1.1 or choice["overlaps"] for choice in choices)
        worst = max(choices, key=lambda choice: choice["ratio"])
        ratio = statistics.median(choice["ratio"] for choice in choices)
        sentences.append(
            f"auto within 10 % of the best strategy in {near} of {len(choices)} rows, within 10 % "
            f"or within the spread in {equal}; in the median {ratio:.2f} times the best, at worst "
            f"{worst['ratio']:.2f} times ({worst['name']})"
        )
    return sentences + [sentence_of(choice) for choice in choices]


def choice_of(row: dict[str, Any]) -> dict[str, Any] | None:
    """How auto did, beside the canonical strategy with the least median. None: it was not timed."""
    ways = row["ways"]
    if AUTO not in ways:
        return None
    best = min((name for name in CANONICAL if name in ways), key=lambda n: ways[n]["median"])
    auto = ways[AUTO]
    return {
        "name": row["name"],
        "best": best,
        "best_seconds": ways[best]["median"],
        "chosen": auto["chosen"],
        "ratio": auto["median"] / ways[best]["median"],
        # Their spreads, p10 to p90, have a time in common.
        "overlaps": auto["p10"] <= ways[best]["p90"] and ways[best]["p10"] <= auto["p90"],
        "chosen_ratio": ways[auto["chosen"]]["median"] / ways[best]["median"],
        "sums_ratio": ways["three_allreduce"]["median"] / ways[best]["median"],
    }


def sentence_of(choice: dict[str, Any]) -> str:
    spread = "spreads overlap" if choice["overlaps"] else "spreads apart"
    return (
        f"{choice['name']}: {choice['best']} is fastest, {choice['sums_ratio']:.1f} times as fast "
        f"as three_allreduce; auto takes {choice['chosen']}: {choice['ratio']:.2f} times the best "
        f"({spread}), in that strategy's own row {choice['chosen_ratio']:.2f}"
    )


def draw(report: Report, path: Path) -> None:
    """For each link: predicted against measured times, and auto against every strategy."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    links = list(dict.fromkeys(row["link"] for row in report.rows))
    figure, axes = pyplot.subplots(2, len(links), figsize=(6 * len(links), 10), squeeze=False)
    for column, link in enumerate(links):
        rows = [row for row in report.rows if row["link"] == link]
        _draw_predictions(axes[0][column], rows)
        axes[0][column].set_title(f"{link}: the model; band: 20 %", fontsize=10)
        _draw_strategies(axes[1][column], rows)
        axes[1][column].set_title(f"{link}: beside the fastest strategy", fontsize=10)
    for above, below in axes.T[:1]:
        above.legend(fontsize=8)
        below.legend(fontsize=8)
    figure.suptitle(f"{report.title}\n{report.environment['cpu']}", fontsize=11)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _draw_predictions(axes: Any, rows: Sequence[dict[str, Any]]) -> None:
    limits: list[float] = []
    for name, color in _colors(rows).items():
        points = [
            (1e3 * way["modelled_seconds"], 1e3 * way["median"])
            for row in rows
            if (way := row["ways"].get(name)) and way["modelled_seconds"] is not None
        ]
        if points:
            axes.plot(*zip(*points, strict=True), ".", color=color, label=name)
        limits += [value for point in points for value in point]
    if limits:
        ends = [min(limits), max(limits)]
        axes.plot(ends, ends, "k-", linewidth=0.6)
        low, high = ([factor * x for x in ends] for factor in (0.8, 1.2))
        axes.fill_between(ends, low, high, alpha=0.1, color="k", linewidth=0)
    axes.set(
        xscale="log", yscale="log", xlabel="modelled ms, by constants alone", ylabel="measured ms"
    )


def _draw_strategies(axes: Any, rows: Sequence[dict[str, Any]]) -> None:
    """A line for each row, a mark for each way, at its time over that of the best."""
    rows = [row for row in rows if AUTO in row["ways"]]
    choices = [choice for row in rows if (choice := choice_of(row)) is not None]
    colors = _colors(rows)
    for name, color in colors.items():
        places = [i for i, row in enumerate(rows) if name in row["ways"]]
        bests = [choices[i]["best_seconds"] for i in places]
        ways = [rows[i]["ways"][name] for i in places]
        ratios = [w["median"] / b for w, b in zip(ways, bests, strict=True)]
        spreads = [
            [(w["median"] - w["p10"]) / b for w, b in zip(ways, bests, strict=True)],
            [(w["p90"] - w["median"]) / b for w, b in zip(ways, bests, strict=True)],
        ]
        is_auto = name == AUTO
        axes.errorbar(
            ratios,
            places,
            xerr=spreads if is_auto else None,
            fmt="o" if is_auto else "|",
            color=color,
            markersize=7 if is_auto else 9,
            markerfacecolor="none",
            elinewidth=0.8,
            label=name,
            zorder=3 if is_auto else 2,
        )
    labels = [f"{row['world_size']} ranks, B={row['batch']}" for row in rows]
    axes.set_yticks(range(len(rows)), labels, fontsize=8)
    axes.invert_yaxis()
    axes.axvspan(1.0, 1.1, color="k", alpha=0.08, linewidth=0)
    axes.set(xscale="log", xlabel="time / fastest strategy's (band: 10 %; bars: auto's p10 to p90)")
    axes.grid(axis="x", alpha=0.3)


def _colors(rows: Sequence[dict[str, Any]]) -> dict[str, str]:
    """auto in black, the others in the order of their names, which is the same everywhere."""
    names = dict.fromkeys(name for row in rows for name in row["ways"])
    others = [name for name in names if name != AUTO]
    colors = {name: f"C{i}" for i, name in enumerate(others)}
    return {**colors, AUTO: "k"} if AUTO in names else colors


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

# Whose bits agree, among which auto chooses.
CANONICAL = ("all_gather", "two_phase", "hierarchical", "butterfly")

NOTES = (
    "A row is named link, p ranks, batch B, n keys per rank and sequence: 32 query and 8 key heads "
    "of 128, bf16, one query token. A call takes from the last rank's start to the last rank's "
    "end, which all read from one clock. The ways of a row take turns; median, p10 and p90 of so "
    "many calls.",
    "The attention itself is not computed, its states come from a formula, against which every "
    "result is checked. What travels is real.",
    "auto: tree_decode's default strategy, with what `python -m tree_attention calibrate` "
    "measured on the same configuration just before; the way's name says which strategy it took.",
    "predicted: what auto goes by, which is calibrate's times of the same exchanges and, for rings "
    "and between sizes, its cost model. constants alone: by how much that model is off without "
    "those times. from 4 ranks: with constants of 4 ranks of lan and of metro; two-level has those "
    "of lan inside nodes and of metro between them.",
    "Bytes and rounds (collectives and rounds of messages) are counted on the rank that has most, "
    "and equal the formulas, or the row is WRONG; wire is what left the host's devices, with "
    "headers and acknowledgements. Gb/s is of all ranks together: all packets go through one "
    "process of this machine, which ends at some Gb/s, so that large messages of many ranks are "
    "slower here than on such a network.",
)
