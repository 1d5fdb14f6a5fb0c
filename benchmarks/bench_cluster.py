# SPDX-License-Identifier: BSD-3-Clause
"""Decoding steps of every strategy and both rings on emulated clusters: needs root.

    sudo .venv/bin/python -m benchmarks.bench_cluster --out DIR

Each configuration is calibrated first, as a user would, and strategy auto chooses by that.
Configurations are LINK/RANKS; --only takes some of them, and DIR/cluster.json keeps the rows of the
others from earlier runs.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from tree_attention import strategies
from tree_attention.bench.measure import load_warnings
from tree_attention.bench.report import Report, environment, print_report, write

from .cluster import LINKS, exit_on_sigterm, unsupported
from .cluster_model import AUTO, add_predictions, costs_of
from .cluster_rank import RINGS
from .cluster_run import load_costs, load_parts, run_cases, without_rows
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
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_cluster")
    names = [f"{link}/{world}" for link in LINKS for world in WORLDS]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="LINK/RANKS")
    parser.add_argument(
        "--seconds", type=float, default=8.0, help="for all ways of a case (default 8)"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="write cluster.{json,md,png} there")
    parsed = parser.parse_args(arguments)
    if (why := unsupported()) is not None:
        print(why, file=sys.stderr)
        return 2
    exit_on_sigterm()
    measured = {} if parsed.out is None else load_parts(parsed.out / "cluster.json")
    for name in parsed.only:
        link, world = name.split("/")
        measured[name] = run_cases(link, int(world), cases(), parsed.seconds)
        print(f"{name}: {measured[name]['seconds']:.0f} s", file=sys.stderr, flush=True)
        report = report_of({name: measured[name] for name in names if name in measured})
        if parsed.out is not None:  # after each, as the whole takes long
            write(report, parsed.out)
    print_report(Console() if sys.stdout.isatty() else Console(width=180), report)
    return 1 if report.wrong else 0


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
