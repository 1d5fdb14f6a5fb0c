# SPDX-License-Identifier: BSD-3-Clause
"""Theorem 1 of Tree Attention, counted: steps, merges and volume of the tree, beside the ring.

python -m lab.papers.theorem1 --out DIR
"""

import sys
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.harness.program import finish, parser_of
from benchmarks.harness.report import Columns, Report, columns_of, environment, verdict
from lab.papers.algorithms.tree import Counts, all_reduce, ring_steps
from tree_attention.reference import attention, merge

FAN_INS = (2, 4, 8, 16)
RANKS = tuple(1 << level for level in range(1, 13))
HEADS, HEAD_DIM = 16, 128  # Tree Attention's Figure 3
KEYS = 5_120_000
ELEMENT = 8  # bytes: the reference computes in float64


def row_of(ranks: int, states: Sequence[tuple[torch.Tensor, torch.Tensor]], whole: Any) -> dict:
    """The counts for a world; `states` has those of the ranks, `whole` that of all their keys."""
    trees = {}
    wrong = False
    for fan_in in FAN_INS:
        counts = Counts()
        merged = all_reduce(states[:ranks], merge, fan_in=fan_in, counts=counts)
        errors = [(a - b).abs().max().item() for a, b in zip(merged, whole, strict=True)]
        wrong |= not max(errors) < 1e-12
        trees[fan_in] = _counted(counts)
    ring = Counts()
    shard = torch.empty(2, KEYS // ranks, HEADS * HEAD_DIM, dtype=torch.float64, device="meta")
    for _ in ring_steps([shard] * ranks, ring):
        ring.merges += 1
    ring.merges -= 1  # the first shard is merged with nothing
    return {
        "name": f"{ranks} ranks",
        "ranks": ranks,
        "local_merges": KEYS // ranks - 1,
        "tree": trees,
        "ring": _counted(ring),
        "wrong": wrong,
    }


def _counted(counts: Counts) -> dict[str, int]:
    return {
        "steps": counts.steps,
        "merges": counts.merges,
        "elements": counts.num_bytes // ELEMENT,
        "busiest_elements": counts.busiest // ELEMENT,
    }


def by_fan_in(key: str) -> Any:
    return lambda row: " / ".join(f"{tree[key]:,}" for tree in row["tree"].values())


COLUMNS: Columns = {
    "ranks": lambda row: f"{row['ranks']:,}",
    "keys/rank - 1": lambda row: f"{row['local_merges']:,}",
    "tree steps": by_fan_in("steps"),
    "tree merges": by_fan_in("merges"),
    "ring steps": lambda row: f"{row['ring']['steps']:,}",
    "tree elements": lambda row: f"{row['tree'][2]['elements']:,}",
    "busiest rank": by_fan_in("busiest_elements"),
    "ring elements": lambda row: f"{row['ring']['elements']:.3g}",
    "its busiest": lambda row: f"{row['ring']['busiest_elements']:.3g}",
    "ring /tree": lambda row: f"{row['ring']['elements'] / row['tree'][2]['elements']:.2g}",
    "right": verdict,
}


def run(ranks: Sequence[int]) -> Report:
    torch.manual_seed(0)
    q = torch.randn(1, HEADS, 1, HEAD_DIM, dtype=torch.float64)
    k, v = torch.randn(2, 1, HEADS, max(ranks), HEAD_DIM, dtype=torch.float64)
    states = [attention(q, k[:, :, i : i + 1], v[:, :, i : i + 1]) for i in range(max(ranks))]
    rows = [row_of(p, states, attention(q, k[:, :, :p], v[:, :, :p])) for p in ranks]
    return Report(
        "theorem1",
        "Theorem 1: an all-reduce of one partial state by trees of fan-in 2 / 4 / 8 / 16, and the "
        "ring of keys and values",
        [
            f"One query, {HEADS} heads of {HEAD_DIM}, {KEYS:,} keys. Steps are rounds of messages, "
            "up the tree and down again; merges wait for each other; elements are those of all "
            "ranks together, of a state (o, lse) and of keys and values.",
            "N / p - 1 merges of a rank's own keys come first: O(N / p + log p), where the base of "
            "the logarithm is the fan-in k and each level has k - 1 merges. A tree of any fan-in "
            "sends 2 (p - 1) states.",
        ],
        environment(),
        rows,
        columns_of(rows, COLUMNS),
    )


def main(arguments: list[str]) -> int:
    parser = parser_of(__doc__, "theorem1")
    parser.add_argument("--ranks", nargs="+", type=int, default=list(RANKS), metavar="N")
    parsed = parser.parse_args(arguments)
    if min(parsed.ranks) < 2:
        parser.error("a world has two ranks or more")
    return finish(run(parsed.ranks), parsed.out)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
