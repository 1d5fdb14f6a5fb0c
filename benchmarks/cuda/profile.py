# SPDX-License-Identifier: BSD-3-Clause
"""Counts of Nsight Compute in one launch for each of three shapes.

ncu --profile-from-start off --set full -o NAME python -m benchmarks.cuda.profile
python -m benchmarks.cuda.profile --read NAME.ncu-rep --out DIR
"""

import argparse
import csv
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from ..harness.measure import InputArena
from ..harness.program import add_out, finish
from ..harness.report import Report, columns_of, environment
from .cases import LATENCY, MLA_16, QUERIES, CudaCase, K
from .inputs import Inputs
from .peers import ours

NAME = "profile_cuda"
TWO_ROW_BLOCKS = CudaCase(QUERIES, heads=(64, 8), lengths=(16 * K,) * 4, seqlen_q=32)
CASES = [LATENCY, MLA_16, TWO_ROW_BLOCKS]
# Metrics that are read, of more than a thousand: time, bytes, occupancy, and what warps wait for.
CHOSEN = re.compile(
    r"gpu__time_duration\.sum|dram__(bytes_read\.sum|throughput\.avg)|lts__t_sector_hit_rate"
    r"|launch__|sm__(throughput|warps_active)\.avg|smsp__(issue_active\.avg|inst_executed\.sum)"
    r"|smsp__average_warps_issue_stalled_\w+_per_issue|l1tex__data_bank_conflicts_pipe_lsu\.sum"
)


def launch() -> None:
    arena = InputArena(max(case.set_bytes for case in CASES), "cuda")
    with torch.inference_mode():
        for case in CASES:
            call = ours(case, Inputs(case, arena, 1))
            call(0)  # loads the kernel, allocates the workspace
            torch.cuda.synchronize()
            torch.cuda.profiler.start()
            call(0)
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()


def counted(table: str) -> dict[str, dict[str, float | str]]:
    """The chosen metrics by case, of a table with a row of names, one of units and one for each
    launch."""
    names, units, *launches = csv.reader(table.splitlines())
    if len(launches) != len(CASES):
        raise ValueError(f"{len(launches)} launches were profiled, expected {len(CASES)}")
    found: dict[str, dict[str, float | str]] = {}
    for case, values in zip(CASES, launches, strict=True):
        found[case.name] = {
            f"{name} [{unit}]" if unit else name: number(value)
            for name, unit, value in zip(names, units, values, strict=True)
            if CHOSEN.match(name)
        }
    return found


def number(text: str) -> float | str:
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return text


def report(path: Path) -> Report:
    table = subprocess.run(
        ["ncu", "--import", path, "--page", "raw", "--csv"],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    rows = [
        {"name": name, "wrong": False, "metrics": metrics}
        for name, metrics in counted(table).items()
    ]
    return Report(
        name=NAME,
        title="lean_decode under Nsight Compute",
        notes=["One launch each, with a cold cache, at the clocks that the GPU has."],
        environment=environment(),
        rows=rows,
        columns=columns_of(rows, COLUMNS),
        is_read_back=True,
    )


def _metric(prefix: str) -> Callable[[Mapping[str, Any]], str]:
    """The first metric that begins so, with its unit."""

    def text(row: Mapping[str, Any]) -> str:
        for name, value in row["metrics"].items():
            if name.startswith(prefix):
                unit = name.partition(" [")[2].rstrip("]")
                return f"{value} {unit}".strip()
        return "-"

    return text


STALLED = "smsp__average_warps_issue_stalled_"  # warps that wait so, for each instruction issued
COLUMNS = {
    "case": lambda row: row["name"],
    "time": _metric("gpu__time_duration.sum"),
    "from DRAM": _metric("dram__bytes_read.sum"),
    "no instruction": _metric(f"{STALLED}no_instruction"),
    "memory": _metric(f"{STALLED}long_scoreboard"),
    "barrier": _metric(f"{STALLED}barrier"),
    "issue slots": _metric("smsp__issue_active"),
}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cuda.profile",
        description="Launches a few shapes for Nsight Compute, or reads what it found.",
    )
    parser.add_argument("--read", type=Path, metavar="FILE", help="ncu's report of the launches")
    add_out(parser, NAME)
    parsed = parser.parse_args(arguments)
    if parsed.read is not None:
        return finish(report(parsed.read), parsed.out)
    launch()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
