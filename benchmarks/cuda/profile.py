# SPDX-License-Identifier: BSD-3-Clause
"""Counts of Nsight Compute in one launch for each of three shapes.

ncu --profile-from-start off --set full -o REPORT python -m benchmarks.cuda.profile
python -m benchmarks.cuda.profile REPORT        # writes REPORT.json
"""

import csv
import json
import re
import subprocess
import sys
from pathlib import Path

import torch

from ..harness.measure import InputArena
from .cases import LATENCY, MLA_16, QUERIES, CudaCase, K
from .inputs import Inputs
from .peers import ours

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


def report(path: str) -> None:
    table = subprocess.run(
        ["ncu", "--import", f"{path}.ncu-rep", "--page", "raw", "--csv"],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    Path(f"{path}.csv").write_text(table)
    Path(f"{path}.json").write_text(json.dumps(counted(table), indent=1))
    print(f"{len(CASES)} launches in {path}.json")


if __name__ == "__main__":
    launch() if len(sys.argv) == 1 else report(sys.argv[1])
