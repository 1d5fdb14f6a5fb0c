# SPDX-License-Identifier: BSD-3-Clause
"""Decoding steps of every strategy and both rings on emulated clusters: needs root.

    sudo .venv/bin/python -m lab.emulation.clusters --out DIR

Each configuration is calibrated first, as a user would, and strategy auto chooses by that.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from benchmarks.harness.places import link_sentences, measure, report_of_places
from benchmarks.harness.report import Report
from tree_attention.exchange.auto.choose import choose
from tree_attention.exchange.strategies import STRATEGIES, strategies

from ..papers.tree_allreduce import NAME as TREE_ALLREDUCE
from ..simulation import RINGS
from .configuration import (
    configurations,
    emulated_parser,
    run_cases,
    topology_of,
    where_emulated,
)
from .fake_attention import problem_of
from .rank import AUTO
from .tables import columns
from .wiring import LINKS

WORLDS = (2, 4, 8, 16)
BATCHES = (1, 16, 64)
RING_TOKENS = 256  # of a rank's shard, all sequences together
# The strategies whose bits agree, among which auto chooses.
CANONICAL = tuple(name for name in strategies() if STRATEGIES[name].is_canonical)
# Tree Attention's Algorithm 3: by trees of log p steps, as it counts them, or else Gloo's.
PUBLISHED = (TREE_ALLREDUCE, "three_allreduce")
# Not slower than the best strategy by more than this factor counts as near it.
NEAR = 1.1

NOTES = (
    "A row is named link, p ranks, batch B, n keys per rank and sequence: 32 query and 8 key heads "
    "of 128, bf16, one query token. A call takes from the last rank's start to the last rank's "
    "end, which all read from one clock. The methods of a row take turns; median, p10 and p90 of "
    "so many calls.",
    "The attention itself is not computed, its states come from a formula, against which every "
    "result is checked. What travels is real.",
    "auto: tree_decode's default strategy, with the table that `python -m tree_attention "
    "calibrate` measured on the same configuration just before; the name says what it took.",
    "tree_allreduce is Tree Attention's Algorithm 3, three reductions of log2 p steps each by our "
    "messages. three_allreduce leaves them to Gloo, whose all-reduce is a ring of 2(p-1) steps.",
    "Bytes and rounds (collectives and rounds of messages) are counted on the rank that has most; "
    "bytes equal the strategy's own formula, or the row is WRONG; wire is what left the host's "
    "devices, with headers and acknowledgements. Gb/s is of all ranks together: all packets go "
    "through one process of this machine, which ends at some Gb/s, so that large messages of many "
    "ranks are slower here than on such a network.",
)


def cases() -> list[dict[str, Any]]:
    return [
        {
            "batch": batch,
            "keys": RING_TOKENS // batch,
            "seconds_per_key": 0.0,
            "min_rounds": 5,
            "methods": [*strategies(), TREE_ALLREDUCE, AUTO, *RINGS],
        }
        for batch in BATCHES
    ]


def main(arguments: list[str]) -> int:
    names = configurations(list(LINKS), WORLDS)
    parser = emulated_parser("clusters", "cluster", names)
    parser.add_argument(
        "--seconds", type=float, default=8.0, help="for all methods of a case (default 8)"
    )
    parsed = parser.parse_args(arguments)

    def run(link: str, world_size: int) -> dict[str, Any]:
        return run_cases(link, world_size, cases(), parsed.seconds)

    name = name_of(parsed.only)
    return where_emulated(lambda: measure(name, names, parsed, run, partial(report_of, name=name)))


def name_of(chosen: Iterable[str]) -> str:
    """Name of the report; configurations of one link alone have a report of their own."""
    links = {name.partition("/")[0] for name in chosen}
    return f"cluster_{links.pop()}" if len(links) == 1 else "cluster"


def report_of(measured: dict[str, Any], name: str = "cluster") -> Report:
    rows = [row for part in measured.values() for row in part["rows"]]
    return report_of_places(
        measured,
        name=name,
        title="Strategies and rings on emulated clusters",
        notes=NOTES,
        rows=rows,
        columns=columns(rows),
        summary=summary(rows, measured),
    )


def summary(rows: Sequence[dict[str, Any]], measured: dict[str, Any]) -> list[str]:
    choices = [choice for row in rows if (choice := choice_of(row)) is not None]
    sentences = link_sentences(measured)
    if choices:
        sentences += [
            sentence_of_all(choices, "ratio", "calibrated auto, in its own calls,"),
            sentence_of_all(choices, "chosen_ratio", "the strategy that calibrated auto took"),
            sentence_of_all(choices, "rule_ratio", "the strategy that the shipped rule takes"),
        ]
    return sentences + [sentence_of(choice) for choice in choices]


def choice_of(row: dict[str, Any]) -> dict[str, Any] | None:
    """Compare auto and the shipped rule with the canonical strategy of the least median.

    None: auto was not timed.
    """
    methods = row["methods"]
    if AUTO not in methods:
        return None
    best = min((name for name in CANONICAL if name in methods), key=lambda n: methods[n]["median"])
    least, auto = methods[best]["median"], methods[AUTO]
    unavailable = {name: "not timed here" for name in STRATEGIES if name not in methods}
    layout = problem_of(row["batch"], row["keys"]).layout
    topology = topology_of(row["link"], row["world_size"])
    rule = choose(layout, topology, "gloo", unavailable=unavailable).strategy
    published = next(name for name in PUBLISHED if name in methods)
    return {
        "name": row["name"],
        "best": best,
        "best_seconds": least,
        "chosen": auto["chosen"],
        "rule": rule,
        "ratio": auto["median"] / least,
        # Their spreads, p10 to p90, have a time in common.
        "overlaps": auto["p10"] <= methods[best]["p90"] and methods[best]["p10"] <= auto["p90"],
        "chosen_ratio": methods[auto["chosen"]]["median"] / least,
        "rule_ratio": methods[rule]["median"] / least,
        "published": published,
        "published_ratio": methods[published]["median"] / least,
    }


def sentence_of_all(choices: Sequence[dict[str, Any]], ratio: str, what: str) -> str:
    near = sum(choice[ratio] <= NEAR for choice in choices)
    worst = max(choices, key=lambda choice: choice[ratio])
    median = statistics.median(choice[ratio] for choice in choices)
    return (
        f"{what} is within 10 % of the best strategy in {near} of {len(choices)} rows; in the "
        f"median {median:.2f} times the best, at worst {worst[ratio]:.2f} times ({worst['name']})"
    )


def sentence_of(choice: dict[str, Any]) -> str:
    spread = "spreads overlap" if choice["overlaps"] else "spreads apart"
    return (
        f"{choice['name']}: {choice['best']} is fastest, {choice['published_ratio']:.1f} times as "
        f"fast as {choice['published']}; auto takes {choice['chosen']}: {choice['ratio']:.2f} "
        f"times the best ({spread}), in that strategy's own row {choice['chosen_ratio']:.2f}; the "
        f"shipped rule takes {choice['rule']}: {choice['rule_ratio']:.2f}"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
