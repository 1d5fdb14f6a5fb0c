# SPDX-License-Identifier: BSD-3-Clause
"""Tree and ring decoding by context length on emulated clusters, as Figure 3 of the Tree Attention
paper: needs root.

    sudo .venv/bin/python -m lab.emulation.contexts --out DIR

Contexts are measured as far as memory and time allow; simulate.py has longer ones.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.harness.machine import available_bytes
from benchmarks.harness.places import link_sentences, measure, report_of_places
from benchmarks.harness.report import Report

from ..simulation import RING, RINGS
from .configuration import (
    attention_seconds_per_key,
    configurations,
    emulated_parser,
    run_cases,
    where_emulated,
)
from .fake_attention import problem_of
from .rank import AUTO
from .tables import columns
from .wiring import LINKS, Wiring

LINK_NAMES = ("lan", "metro")
WORLDS = (2, 4, 8)
CONTEXTS = (2048, 8192, 1 << 16, 1 << 18, 1 << 20)  # keys per rank
# From here on keys and values are sent from one memory, and received into two.
ONE_MEMORY = 1 << 18
# A call is not to take longer, with what the links and the relay carry at best.
LONGEST_CALL = 30.0
RELAY_RATE = 6e9  # bits per second, of all hosts together
PROCESS_BYTES = 350 << 20

NOTES = (
    "A row is named link, p ranks, batch B, n keys per rank: 32 query and 8 key heads of 128, "
    "bf16, one query token. A call takes from the last rank's start to the last rank's end, which "
    "all read from one clock. The methods of a row take turns; median, p10 and p90 of so many "
    "calls.",
    "Computing a shard's attention takes the time that one thread of this machine needed, asleep, "
    "as all ranks share few processors; states come from a formula, against which every result is "
    "checked. What travels is real: from 256k keys on, keys and values are sent from the same "
    "memory and received into two.",
    "auto is tree_decode's default strategy, with what `python -m tree_attention calibrate` "
    "measured on the same configuration just before. The ring hides computing behind its "
    "transfers, or these behind computing.",
    "Bytes and rounds (collectives and rounds of messages) are counted on the rank that has most; "
    "bytes equal the formulas, or the row is WRONG; wire is what left the host's devices. Gb/s is "
    "of all ranks together: all packets go through one process of this machine, which ends at some "
    "Gb/s. So the rings of many ranks are slower here than on such a network, and their ratio to "
    "the tree is larger.",
    "At line rate a ring takes (p - 1) * max(8 * shard bytes / rate, attention) + attention: what "
    "it could do at best if every link carried its full rate at once. The tree's measured time "
    "stands beside that, too.",
)


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
            "methods": [AUTO, *RINGS],
        }
        for keys in CONTEXTS
        if call_seconds(wiring, world_size, keys) <= LONGEST_CALL
        and needed_bytes(world_size, keys) <= memory
    ]


def call_seconds(wiring: Wiring, world_size: int, keys: int) -> float:
    """Seconds that a ring takes at least, through the relay."""
    bits = 8 * (world_size - 1) * problem_of(1, keys).kv_bytes
    return bits / min(wiring.between.rate, RELAY_RATE / world_size)


def needed_bytes(world_size: int, keys: int) -> int:
    """Bytes of all ranks together: shards, and what rings receive into."""
    shard = problem_of(1, keys).kv_bytes
    own = shard // (2 if keys >= ONE_MEMORY else 1)
    return world_size * (own + min(2, world_size - 1) * shard + PROCESS_BYTES)


def main(arguments: list[str]) -> int:
    names = configurations(LINK_NAMES, WORLDS)
    parser = emulated_parser("contexts", "contexts", names)
    parser.add_argument(
        "--longest", type=int, default=CONTEXTS[-1], metavar="KEYS", help="of a rank, measured"
    )
    parser.add_argument(
        "--seconds", type=float, default=5.0, help="for all methods of a context (default 5)"
    )
    parsed = parser.parse_args(arguments)

    def run(link: str, world_size: int) -> dict[str, Any]:
        seconds_per_key = attention_seconds_per_key()
        chosen = cases(LINKS[link], world_size, seconds_per_key, available_bytes())
        chosen = [case for case in chosen if case["keys"] <= parsed.longest]
        return run_cases(link, world_size, chosen, parsed.seconds)

    return where_emulated(lambda: measure("contexts", names, parsed, run, report_of))


def report_of(measured: dict[str, Any]) -> Report:
    rows = [row for part in measured.values() for row in part["rows"]]
    return report_of_places(
        measured,
        name="contexts",
        title="Tree and ring decoding by context on emulated clusters",
        notes=NOTES,
        rows=rows,
        columns=columns(rows),
        summary=link_sentences(measured) + [s for name in measured for s in ratios_of(name, rows)],
    )


def ratios_of(configuration: str, rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the ring's time over the tree's, measured and with the ring at line rate."""
    chosen = [row for row in rows if f"{row['link']}/{row['world_size']}" == configuration]
    if not chosen:
        return []
    measured, at_line_rate = (
        ", ".join(
            f"{seconds(row) / row['methods'][AUTO]['median']:,.1f} at {row['keys']:,}"
            for row in chosen
        )
        for seconds in (ring_seconds, line_rate_seconds)
    )
    longest = chosen[-1]
    return [
        f"{configuration}: ring / tree by keys per rank: {measured}; with the ring at line rate: "
        f"{at_line_rate} (there {line_rate_seconds(longest):.2f} s for the longest instead of "
        f"{ring_seconds(longest):.2f} s)"
    ]


def ring_seconds(row: dict[str, Any]) -> float:
    return float(row["methods"][RING]["median"])


def line_rate_seconds(row: dict[str, Any]) -> float:
    """Seconds of the ring if every link carried its full rate at once."""
    problem = problem_of(row["batch"], row["keys"])
    attention = row["seconds_per_key"] * row["batch"] * row["keys"]
    transfer = 8 * problem.kv_bytes / LINKS[row["link"]].between.rate
    return float((row["world_size"] - 1) * max(transfer, attention) + attention)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
