# SPDX-License-Identifier: BSD-3-Clause
"""Tree and ring decoding by context length on emulated clusters, as Figure 3 of the Tree Attention
paper: needs root.

    sudo .venv/bin/python -m benchmarks.bench_contexts --out DIR

Contexts are measured as far as memory and time allow, and predicted by the cost model beyond.
"""

from __future__ import annotations

import sys
from typing import Any

from tree_attention.bench.measure import load_warnings
from tree_attention.bench.report import Report, environment
from tree_attention.exchange.costs import Calibration

from .cluster import LINKS, Wiring
from .cluster_contexts import NOTES, RING, TREE, draw, summary
from .cluster_main import configurations, measure, parser_of
from .cluster_model import add_predictions, shard_bytes
from .cluster_rank import RINGS
from .cluster_run import attention_seconds_per_key, load_costs, run_cases, without_rows
from .cluster_table import columns
from .machine import available_bytes

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
    parser = parser_of("contexts", names)
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


if __name__ == "__main__":
    assert RING in RINGS
    sys.exit(main(sys.argv[1:]))
