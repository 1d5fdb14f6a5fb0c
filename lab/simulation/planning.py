# SPDX-License-Identifier: BSD-3-Clause
"""Writes into docs/planning.md what `tree_attention.planning` predicts for measured runs, and what
the commands of its examples print.

    python -m lab.simulation.planning

Measured by `benchmarks/scaling.py` over two ranks, and by `benchmarks/latent` in one
process, of a mixture of experts with latents. The row of `scaling.py` with one process and one
thread says how fast a rank reads memory and computes. The other rows are predicted from that and
from the link, which is what `calibrate` measured between the ranks.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.harness import regions
from benchmarks.harness.report import ROOT
from benchmarks.latent.model import CHUNK, OURS, configuration
from tree_attention.cli.models import from_config
from tree_attention.exchange.auto.choose import CostTable, Measured, MeasuredHost
from tree_attention.planning.arithmetic import (
    PROMPTS,
    SPLIT,
    SPLIT_BY_HEADS,
    WHOLE,
    Split,
    Work,
)
from tree_attention.planning.machines import Hosts, Link, Machine, fitted_link
from tree_attention.planning.models import Model, llama

PAGE, RESULTS = ROOT / "docs/planning.md", ROOT / "benchmarks/results"
FORMS = {
    ("whole", 1, "replicated"): WHOLE,
    ("whole", 1, "split"): PROMPTS,
    ("split", 1, "replicated"): SPLIT,
    ("split", 2, "replicated"): SPLIT_BY_HEADS,
}
# scaling.json has no table of exchanges for the ranks of one host. `calibrate` with two ranks on a
# machine of the same kind, for states of 16 KiB to 1 MiB.
SHARED_MEMORY = Link(2.1e9, 90e-6, "shared memory of one host")
_TIMES = (
    *("ms per token: measured", "predicted", "error", "prefill s: measured", "predicted", "error"),
)
HEADINGS = ("place/ranks", "form", "MB: measured", "predicted", "error", *_TIMES)
# A command and, in the block after it, what it prints.
EXAMPLE = re.compile(
    r"(?P<command>```sh\n(?P<line>python -m [^\n]*(?:\\\n[^\n]*)*)\n```\n+```\n)[^`]*```\n"
)
LATENT_HEADINGS = ("tokens", "cache MB: measured", "predicted", "error", *_TIMES)


def fitted_machine(model: Model, work: Work, row: dict[str, Any]) -> Machine:
    """Return the machine on which one process takes what was measured."""
    unit = Machine("unit", 1.0, math.inf, math.inf, "")
    alone = Split(model, WHOLE, 1, work)
    read = alone.token_seconds(Hosts(unit, SHARED_MEMORY)).total
    unit = Machine("unit", math.inf, 1.0, math.inf, "")
    # At the peak of which the planner takes SUSTAINED, as the time for one operation does.
    peak = alone.prefill_seconds(Hosts(unit, SHARED_MEMORY)).total / row["prefill_seconds"]
    return Machine("fitted", read / row["token_seconds"], peak, math.inf, "")


def rows() -> list[list[str]]:
    measured, model, work, machine = _scaling()
    found = []
    for row in measured["rows"]:
        if row["world_size"] == 1:
            continue
        place = f"{row['link']}/{row['world_size']}"
        costs = measured["configurations"][place].get("costs")
        hosts = Hosts(machine, SHARED_MEMORY if costs is None else _link(costs))
        form = FORMS[row["weights"], row["tensor_parallel_size"], row["prefill"]]
        split = Split(model, form, row["world_size"], work)
        cells = _cells(
            (1e-6 * (row["weights_bytes"] + row["kv_bytes"]), 1e-6 * split.held_bytes),
            (1e3 * row["token_seconds"], 1e3 * split.token_seconds(hosts).total),
            (row["prefill_seconds"], split.prefill_seconds(hosts).total),
        )
        found.append([place, form, *cells])
    return found


def latent_rows() -> list[list[str]]:
    machine = _scaling()[-1]
    model = from_config("", configuration())
    hosts = Hosts(machine, SHARED_MEMORY)
    found = []
    for row in json.loads((RESULTS / "latent_model.json").read_text())["rows"]:
        context = int(row["name"].removesuffix(" tokens").replace(",", ""))
        alone = Split(model, WHOLE, 1, Work(context, chunk=CHUNK))
        token = row["times"][OURS]["median_us"]
        cells = _cells(
            (1e-6 * context * row["bytes_per_token"], 1e-6 * alone.cache_bytes),
            (1e-3 * token, 1e3 * alone.token_seconds(hosts).total),
            (row["prefill_seconds"][OURS], alone.prefill_seconds(hosts).total),
        )
        found.append([f"{context:,}", *cells])
    return found


def _scaling() -> tuple[Any, Model, Work, Machine]:
    measured = json.loads((RESULTS / "scaling.json").read_text())
    spec = measured["configurations"]["bare/1"]["model"]
    model = llama("", spec["layers"], 2048, 8192, 32, 8, 128256, 64, tied=True)
    work = Work(spec["prompt"], chunk=spec["chunk"])
    one = next(row for row in measured["rows"] if row["threads"] == 1)
    return measured, model, work, fitted_machine(model, work, one)


def _cells(*pairs: tuple[float, float]) -> list[str]:
    return [
        cell
        for known, predicted in pairs
        for cell in (
            f"{known:,.1f}",
            f"{predicted:,.1f}",
            f"{round(100 * (predicted / known - 1)):+d} %",
        )
    ]


def _link(costs: dict[str, Any]) -> Link:
    exchanges = tuple(Measured(**exchange) for exchange in costs["exchanges"])
    return fitted_link(CostTable(costs["backend"], tuple(costs["nodes"]), exchanges), "")


def table() -> str:
    return _table(HEADINGS, rows(), 2)


def latent_table() -> str:
    return _table(LATENT_HEADINGS, latent_rows(), 1)


def _table(headings: tuple[str, ...], cells: list[list[str]], num_names: int) -> str:
    rules = ["---"] * num_names + ["---:"] * (len(headings) - num_names)
    return "\n".join(f"| {' | '.join(line)} |" for line in (headings, rules, *cells)) + "\n"


def save_example_costs(path: Path) -> None:
    """Write the table of two hosts that the commands of the pages call costs.json."""
    rows = Measured("all_gather", 16384, 170e-6), Measured("all_gather", 1 << 20, 1010e-6)
    new = MeasuredHost("new", 60e9, 60e9, 1e12, 64e9, layer=0.0)
    old = MeasuredHost("old", 20e9, 20e9, 0.3e12, 64e9, layer=0.0)
    CostTable("gloo", (0, 1), rows, (new, old)).save(str(path), {})


def _printed(command: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        save_example_costs(Path(folder) / "costs.json")
        output = subprocess.run(
            [sys.executable, *shlex.split(command.replace("\\\n", " "))[1:]],
            cwd=folder,
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        ).stdout
    return "".join(f"{line.rstrip()}\n" for line in output.splitlines())


def written(page: str) -> str:
    """Return docs/planning.md with today's tables and outputs."""
    for name, text in (("forms", table()), ("latents", latent_table())):
        page = regions.written(page, f"python -m lab.simulation.planning: {name}", text.rstrip())
    return EXAMPLE.sub(lambda found: found["command"] + _printed(found["line"]) + "```\n", page)


if __name__ == "__main__":
    argparse.ArgumentParser(
        prog="python -m lab.simulation.planning",
        description="Writes the tables and the examples' outputs of docs/planning.md.",
    ).parse_args()
    PAGE.write_text(written(PAGE.read_text()))
