# SPDX-License-Identifier: BSD-3-Clause
"""Tree and ring decoding by context length on emulated clusters, as Figure 3 of the Tree Attention
paper: needs root.

    sudo .venv/bin/python -m benchmarks.emulation.contexts --out DIR

Contexts are measured as far as memory and time allow, and predicted by the cost model beyond.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tree_attention.exchange.costs import Calibration

from ..harness.machine import available_bytes
from ..harness.measure import load_warnings
from ..harness.report import Report, environment
from .configuration import (
    attention_seconds_per_key,
    configurations,
    load_costs,
    measure,
    parser_of,
    run_cases,
    without_rows,
)
from .model import add_predictions, shard_bytes
from .rank import RINGS
from .tables import columns, error_sentence, link_sentences
from .wiring import LINKS, Wiring

TREE, RING = "auto", "ring"
LINK_NAMES = ("lan", "metro")
WORLDS = (2, 4, 8)
CONTEXTS = (2048, 8192, 1 << 16, 1 << 18, 1 << 20)  # keys per rank
# From here on keys and values are sent from one memory, and received into two.
ONE_MEMORY = 1 << 18
# A call is not to take longer, with what the links and the relay carry at best.
LONGEST_CALL = 30.0
RELAY_RATE = 6e9  # bits per second, of all hosts together
PROCESS_BYTES = 350 << 20


def cases(
    wiring: Wiring, world_size: int, seconds_per_key: float, memory: int
) -> list[dict[str, Any]]:
    """The contexts that can be measured in `memory` bytes."""
    return [
        {
            "batch": 1,
            "keys": keys,
            "seconds_per_key": seconds_per_key,
            "min_rounds": 2,
            "one_memory": keys >= ONE_MEMORY,
            "ways": [TREE, *RINGS],
        }
        for keys in CONTEXTS
        if call_seconds(wiring, world_size, keys) <= LONGEST_CALL
        and needed_bytes(world_size, keys) <= memory
    ]


def call_seconds(wiring: Wiring, world_size: int, keys: int) -> float:
    """That a ring takes at least."""
    bits = 8 * (world_size - 1) * shard_bytes(1, keys)
    return bits / min(wiring.between.rate, RELAY_RATE / world_size)


def needed_bytes(world_size: int, keys: int) -> int:
    """Of all ranks together: shards, and what rings receive into."""
    own = shard_bytes(1, keys) // (2 if keys >= ONE_MEMORY else 1)
    received = min(2, world_size - 1) * shard_bytes(1, keys)
    return world_size * (own + received + PROCESS_BYTES)


def main(arguments: list[str]) -> int:
    names = configurations(LINK_NAMES, WORLDS)
    parser = parser_of("contexts", "contexts", names)
    parser.add_argument(
        "--longest", type=int, default=CONTEXTS[-1], metavar="KEYS", help="of a rank, measured"
    )
    parser.add_argument(
        "--seconds", type=float, default=5.0, help="for all ways of a context (default 5)"
    )
    parsed = parser.parse_args(arguments)

    def run(link: str, world_size: int) -> dict[str, Any]:
        seconds_per_key = attention_seconds_per_key()
        chosen = cases(LINKS[link], world_size, seconds_per_key, available_bytes())
        chosen = [case for case in chosen if case["keys"] <= parsed.longest]
        return run_cases(link, world_size, chosen, parsed.seconds)

    return measure("contexts", names, parsed, run, report_of)


def report_of(measured: dict[str, Any]) -> Report:
    rows = []
    for part in measured.values():
        calibration = load_costs(part["costs"])
        for row in part["rows"]:
            add_predictions(row, LINKS[row["link"]], calibration)
        rows += part["rows"]
        if calibration is not None and part["rows"]:
            rows += predicted_rows(part["rows"], calibration)
    return Report(
        name="contexts",
        title="Tree and ring decoding by context on emulated clusters",
        notes=NOTES,
        environment=environment(configurations=", ".join(measured)),
        rows=rows,
        columns=columns(rows, {"predicted_seconds": "off by"}),
        summary=summary(rows, measured),
        warnings=load_warnings([part["other_load"] for part in measured.values()]),
        more={"configurations": without_rows(measured)},
        draw=draw,
    )


def predicted_rows(
    measured: list[dict[str, Any]], calibration: Calibration
) -> list[dict[str, Any]]:
    """Of a configuration, those that were not measured."""
    like, done = measured[0], {row["keys"] for row in measured}
    rows = []
    for keys in CONTEXTS:
        if keys in done:
            continue
        # auto chooses by the state, which is the same at any context.
        ways = {
            name: {"chosen": way["chosen"]} if "chosen" in way else {}
            for name, way in like["ways"].items()
        }
        name = f"{like['link']} p={like['world_size']} B=1 n={keys}"
        row = {**like, "name": name, "keys": keys, "only_predicted": True, "ways": ways}
        add_predictions(row, LINKS[row["link"]], calibration)
        rows.append(row)
    return rows


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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))


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
