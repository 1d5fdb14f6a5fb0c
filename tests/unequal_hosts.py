# SPDX-License-Identifier: BSD-3-Clause
"""Hosts of ranks that read memory at given speeds, as `calibrate` would have measured them."""

from collections.abc import Sequence
from pathlib import Path

from tree_attention.exchange import CostTable, MeasuredHost
from tree_attention.exchange.auto.choose import Measured


def hosts(*gigabytes: float, memory: float = 64e9) -> tuple[MeasuredHost, ...]:
    """Hosts that read so many GB/s, multiply in proportion, and lose no time in layers."""
    return tuple(
        MeasuredHost(f"h{x:g}", x * 1e9, x * 1e9, x * 1e11, memory, layer=0.0) for x in gigabytes
    )


def costs_of(
    path: Path, found: Sequence[MeasuredHost], nodes: Sequence[int], small: float, large: float
) -> Path:
    """A table of these hosts, whose exchanges of 16 KiB and of 1 MiB take so many seconds."""
    rows = Measured("all_gather", 16 << 10, small), Measured("all_gather", 1 << 20, large)
    CostTable("gloo", tuple(nodes), rows, tuple(found)).save(path, {})
    return path
