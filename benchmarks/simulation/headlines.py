# SPDX-License-Identifier: BSD-3-Clause
"""What the study says first: the paper's cases, who wins where, and what the paper says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..harness.report import Column, columns_of
from .published import (
    FIGURE_3,
    FIGURE_3_KEYS,
    FIGURE_3_RATIO,
    Comparison,
    overhead_that_explains,
)
from .rings import RING, RING_PASS_Q

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
            "bytes right": lambda row: "WRONG" if row["wrong"] else "yes",
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


def published_sentences(published: Sequence[Comparison]) -> list[str]:
    result = []
    for c in published:
        paper = "no number" if c.published is None else f"{c.published:,.2f} {c.unit}"
        ratio = "" if c.error is None else f", {1 + c.error:,.2f} times the paper's"
        result.append(f"{c.what}: simulated {c.simulated:,.2f} {c.unit}, paper {paper}{ratio}.")
    largest = published[len(FIGURE_3) - 1]
    seconds = overhead_that_explains(largest.tree_seconds, largest.ring_seconds, FIGURE_3_RATIO)
    result.append(
        f"Figure 3's x8 would need {1e3 * seconds:,.0f} ms of fixed overhead in both arms: links "
        "and memory alone make the ratio far larger."
    )
    return result
