# SPDX-License-Identifier: BSD-3-Clause
"""Decoding steps of every strategy and both rings on emulated clusters: needs root.

    sudo .venv/bin/python -m benchmarks.bench_cluster --out DIR

Each configuration is calibrated first, as a user would, and strategy auto chooses by that.
"""

from __future__ import annotations

import sys
from typing import Any

from tree_attention import strategies
from tree_attention.bench.measure import load_warnings
from tree_attention.bench.report import Report, environment

from .cluster import LINKS
from .cluster_main import configurations, measure, parser_of
from .cluster_model import AUTO, add_predictions, costs_of
from .cluster_rank import RINGS
from .cluster_run import load_costs, run_cases, without_rows
from .cluster_steps import NOTES, draw, summary
from .cluster_table import columns

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
    parser = parser_of("cluster", names)
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
