# SPDX-License-Identifier: BSD-3-Clause
"""Gain of a second host: `benchmarks/scaling.py`, also over the links of emulated hosts.

    sudo .venv/bin/python -m lab.emulation.scaling --out benchmarks/results

Needs root for the emulated hosts alone. Every emulated host is one rank with one thread.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from benchmarks import scaling

from .configuration import run
from .hosts import exit_on_sigterm
from .network import unsupported
from .wiring import LINKS

WIRINGS = {
    "lan": LINKS["lan"],
    "metro": LINKS["metro"],
    "two-level": replace(LINKS["two-level"], per_node=2),
}
NAMES = (*scaling.NAMES, "lan/2", "metro/2", "two-level/4")


def run_emulated(
    place: str, world_size: int, program: Sequence[str], spec: dict[str, Any]
) -> dict[str, Any]:
    """What ranks on emulated hosts report, as `run` of a configuration has it."""
    if (why := unsupported()) is not None:
        raise SystemExit(why)
    exit_on_sigterm()
    return run(WIRINGS[place], world_size, program, spec)


if __name__ == "__main__":
    sys.exit(scaling.main(sys.argv[1:], "lab.emulation.scaling", NAMES, run_emulated))
