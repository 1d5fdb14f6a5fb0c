# SPDX-License-Identifier: BSD-3-Clause
"""Headlines of the study: the paper's cases, and who wins where."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.harness.report import Column, columns_of, verdict

from .rings import RING, RING_PASS_Q

# The GPUs and the longest context of the Tree Attention paper's Figure 3.
FIGURE_3 = (8, 64, 128)
FIGURE_3_KEYS = 5_120_000
TITLE = f"Simulated decoding steps over {FIGURE_3_KEYS:,} keys: tree against ring"


def headline_columns(rows: Sequence[dict[str, Any]]) -> list[Column]:
    def milliseconds(method: str) -> Callable[[dict[str, Any]], str]:
        return lambda row: _milliseconds(row["methods"][method or row["best"]]["seconds"])

    return columns_of(
        rows,
        {
            "cluster": lambda row: row["cluster"],
            "ranks": lambda row: f"{row['world_size']:,}",
            "attention ms": lambda row: _milliseconds(row["attention_seconds"]),
            "best tree": lambda row: row["best"],
            "its ms": milliseconds(""),
            "ring ms": milliseconds(RING),
            "ring /best": lambda row: f"{row['ring_over_tree']:,.0f}",
            "passing queries, ms": milliseconds(RING_PASS_Q),
            "it /best": lambda row: f"{row['pass_q_over_tree']:,.2f}",
            "3 all-reduces, ms": milliseconds("three_allreduce"),
            "they /best": lambda row: f"{row['published_over_tree']:,.2f}",
            "bytes right": verdict,
        },
    )


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:,.3f}" if seconds < 0.1 else f"{1e3 * seconds:,.0f}"


def sentences(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Who wins on each cluster."""
    result = []
    for cluster in dict.fromkeys(row["cluster"] for row in rows):
        of_cluster = [row for row in rows if row["cluster"] == cluster]
        ratios = sorted(row["ring_over_tree"] for row in of_cluster)
        slower = [row["name"] for row in of_cluster if row["ring_over_tree"] < 1]
        result.append(
            f"{cluster}: the best tree is {ratios[0]:,.1f} to {ratios[-1]:,.0f} times as fast as "
            f"the ring{' (slower in: ' + ', '.join(slower) + ')' if slower else ''}. Fastest at "
            f"the longest context: {_winners(of_cluster)}."
        )
    return result


def _winners(rows: Sequence[dict[str, Any]]) -> str:
    longest = [row for row in rows if row["keys"] == FIGURE_3_KEYS]
    result = []
    for batch in sorted({row["batch"] for row in longest}):
        places: dict[str, list[str]] = {}
        for row in longest:
            if row["batch"] == batch:
                places.setdefault(row["best"], []).append(f"{row['world_size']:,}")
        of_batch = (f"{best} (p = {', '.join(ranks)})" for best, ranks in places.items())
        result.append(f"B = {batch} {', '.join(of_batch)}")
    return "; ".join(result)
