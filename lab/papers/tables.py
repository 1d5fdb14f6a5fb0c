# SPDX-License-Identifier: BSD-3-Clause
"""Tree Attention's Tables 1 and 2 as printed, and the least squares of what they differ by."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..simulation import CLUSTERS, Problem
from ..simulation.clusters import OF_PAPER
from ..simulation.fabric import Floats

TOKENS = 10


@dataclass(frozen=True)
class Table:
    """Seconds of ten generated tokens, prefill included, by context."""

    name: str
    world_size: int
    heads: int
    head_dim: int
    layers: int
    data_sheet: str
    fitted: str
    seconds: dict[int, tuple[float, float]]  # tree, ring
    errors: dict[int, tuple[float, float]]  # their standard errors

    def problem(self, keys: int) -> Problem:
        heads = (self.heads, self.heads)
        return Problem(keys // self.world_size, heads=heads, head_dim=self.head_dim)

    def difference(self, keys: int) -> float:
        """Ring - tree in seconds per layer and token: prefill is the same in both."""
        tree, ring = self.seconds[keys]
        return (ring - tree) / (TOKENS * self.layers)

    def standard_error(self, keys: int) -> float:
        return float(np.hypot(*self.errors[keys])) / (TOKENS * self.layers)


LLAMA_8B = (32, 128, 32)
TABLES = {
    "tree_table_1_h100": Table(
        "Tree Attention, Table 1: Llama 3.1 8B, 8 H100",
        8,
        *LLAMA_8B,
        "dgx_h100",
        "fitted_h100",
        {32_000: (0.60, 2.57), 64_000: (1.08, 4.42), 128_000: (2.68, 6.38), 256_000: (2.89, 8.19)},
        {32_000: (0.15, 0.35), 64_000: (0.10, 0.38), 128_000: (0.28, 0.58), 256_000: (0.62, 1.07)},
    ),
    "tree_table_1_mi300x": Table(
        "Tree Attention, Table 1: Llama 3.1 8B, 4 MI300X",
        4,
        *LLAMA_8B,
        "mi300x",
        "fitted_mi300x",
        {32_000: (1.05, 3.57), 64_000: (2.36, 7.33), 128_000: (6.43, 16.4), 256_000: (15.3, 35.12)},
        {32_000: (0.01, 0.25), 64_000: (0.01, 0.25), 128_000: (0.25, 0.40), 256_000: (4.93, 5.02)},
    ),
    "tree_table_2": Table(
        "Tree Attention, Table 2: Llama 3.2 1B, 2 RTX 4090",
        2,
        32,
        64,
        16,
        "pcie_4090",
        "fitted_4090",
        {8_000: (0.34, 1.38), 16_000: (0.58, 2.77), 20_000: (0.74, 3.47), 32_000: (1.01, 5.45)},
        {8_000: (0.05, 0.07), 16_000: (0.07, 0.04), 20_000: (0.01, 0.04), 32_000: (0.02, 0.03)},
    ),
}
NAMED = {**CLUSTERS, **OF_PAPER}


def fit(table: Table) -> tuple[float, float]:
    """Bytes per second and seconds that explain the differences best, by least squares: of a ring
    whose hops wait for one another, and of everything else."""
    slope, constant = np.polyfit(*_sizes_and_differences(table), 1)
    return float(1 / slope), float(constant)


def left_out(table: Table) -> dict[int, float]:
    """The difference at each context by the fit to all others."""
    sizes, differences = _sizes_and_differences(table)
    found = {}
    for i, keys in enumerate(table.seconds):
        others = np.arange(len(sizes)) != i
        found[keys] = float(np.polyval(np.polyfit(sizes[others], differences[others], 1), sizes[i]))
    return found


def fit_of_bandwidth(table: Table) -> tuple[float, float]:
    """Bytes per second without anything else, and the largest relative error."""
    sizes, differences = _sizes_and_differences(table)
    slope = sizes @ differences / (sizes @ sizes)
    return float(1 / slope), float(np.abs(slope * sizes / differences - 1).max())


def _sizes_and_differences(table: Table) -> tuple[Floats, Floats]:
    keys = list(table.seconds)
    sizes = [float((table.world_size - 1) * table.problem(count).kv_bytes) for count in keys]
    return np.array(sizes), np.array([table.difference(count) for count in keys])
