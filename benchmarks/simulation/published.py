# SPDX-License-Identifier: BSD-3-Clause
"""What the Tree Attention paper (arXiv:2408.04093) reports, beside the simulation of its set-ups.

The paper's ring expands key heads to query heads, and its tree is Algorithm 3's three all-reduces.
"""

from __future__ import annotations

from dataclasses import dataclass

from .clusters import CLUSTERS
from .problem import Problem
from .rings import RING
from .steps import simulate

TREE = "three_allreduce"
FIGURE_3 = (8, 64, 128)  # GPUs
FIGURE_3_KEYS = 5_120_000
FIGURE_3_RATIO = 8.0  # "close to x8" at 128 GPUs, the only number that the text gives


@dataclass(frozen=True)
class Table:
    """Seconds (tree, ring) of ten generated tokens, prefill included, by context."""

    name: str
    cluster: str
    world_size: int
    heads: int
    head_dim: int
    layers: int
    seconds: dict[int, tuple[float, float]]


TABLES = (
    Table(
        "Table 1: Llama 3.1 8B, 8 H100",
        "dgx_h100",
        8,
        32,
        128,
        32,
        {
            32_000: (0.60, 2.57),
            64_000: (1.08, 4.42),
            128_000: (2.68, 6.38),
            256_000: (2.89, 8.19),
        },
    ),
    Table(
        "Table 2: Llama 3.2 1B, 2 RTX 4090",
        "pcie_4090",
        2,
        32,
        64,
        16,
        {8_000: (0.34, 1.38), 16_000: (0.58, 2.77), 20_000: (0.74, 3.47), 32_000: (1.01, 5.45)},
    ),
)
TOKENS = 10


@dataclass(frozen=True)
class Comparison:
    """A published number and the simulated one; None where the paper gives none in numbers."""

    what: str
    tree_seconds: float
    ring_seconds: float
    published: float | None
    simulated: float
    unit: str

    @property
    def error(self) -> float | None:
        return None if self.published is None else self.simulated / self.published - 1


@dataclass(frozen=True)
class Elements:
    """Numbers of elements that a rank keeps at its peak, beside its shard."""

    tree: int
    ring: int


def paper_elements(problem: Problem) -> Elements:
    """Eq. 9 (tree) and Eq. 8 (ring) without the 2btd elements of the shard itself: its ring has a
    second shard, of the neighbour."""
    rows = problem.batch * problem.heads[0]
    width = rows * problem.head_dim
    return Elements(2 * width + 2 * rows, problem.kv_bytes // problem.dtype.itemsize + 2 * width)


def memory_sentences() -> list[str]:
    """Eq. 8 and 9 beside what the paper measured."""
    result = []
    for hidden in (2048, 4096):
        problem = Problem(64_000, 1, (hidden // 128, hidden // 128))
        shard, beside = problem.kv_bytes // 2, paper_elements(problem)
        tree, ring = shard + beside.tree, shard + beside.ring
        result.append(
            f"Peak memory by the paper's Eq. 9 and 8, hidden size {hidden}, 64,000 keys per rank, "
            f"2 bytes per element: tree {2e-6 * tree:,.1f} MB, ring {2e-6 * ring:,.1f} MB, ring - "
            f"tree {2e-6 * (ring - tree):,.1f} MB; Figure 4 measured "
            f"{524 if hidden == 2048 else 1040} MB. A ring that receives while it attends and "
            "sends needs another shard, as this library's does from three ranks on."
        )
    return result


def comparisons() -> list[Comparison]:
    result = []
    for world_size in FIGURE_3:
        problem = Problem(FIGURE_3_KEYS // world_size, heads=(16, 16))
        tree, ring = _both(problem, "dgx_h100", world_size)
        published = FIGURE_3_RATIO if world_size == FIGURE_3[-1] else None
        what = f"Figure 3: ring / tree, {world_size} H100, 5.12M keys"
        result.append(Comparison(what, tree, ring, published, ring / tree, "x"))
    for table in TABLES:
        for keys, (tree_published, ring_published) in table.seconds.items():
            heads = (table.heads, table.heads)
            problem = Problem(keys // table.world_size, heads=heads, head_dim=table.head_dim)
            tree, ring = _both(problem, table.cluster, table.world_size)
            # Prefill is the same in both.
            difference = (ring_published - tree_published) / (TOKENS * table.layers)
            what = f"{table.name}: ring - tree per layer and token, {keys // 1000}k keys"
            result.append(Comparison(what, tree, ring, 1e3 * difference, 1e3 * (ring - tree), "ms"))
    return result


def overhead_that_explains(tree: float, ring: float, ratio: float) -> float:
    """Seconds that, added to both times, make `ratio` of them."""
    return (ring - ratio * tree) / (ratio - 1)


def _both(problem: Problem, cluster: str, world_size: int) -> tuple[float, float]:
    return tuple(  # type: ignore[return-value]
        simulate(method, problem, CLUSTERS[cluster], world_size).seconds for method in (TREE, RING)
    )
