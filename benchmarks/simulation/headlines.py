# SPDX-License-Identifier: BSD-3-Clause
"""What the study says first: the paper's cases, who wins where, and what the paper says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..harness.report import Column
from .problem import Problem
from .published import (
    FIGURE_3,
    FIGURE_3_KEYS,
    FIGURE_3_RATIO,
    Comparison,
    overhead_that_explains,
    paper_elements,
)
from .rings import RING, RING_PASS_Q

TITLE = f"Simulated decoding steps over {FIGURE_3_KEYS:,} keys: tree against ring"


def headline_columns(rows: Sequence[dict[str, Any]]) -> list[Column]:
    def column(heading: str, text: Callable[[dict[str, Any]], str]) -> Column:
        return Column(heading, [text(row) for row in rows])

    def milliseconds(method: str) -> Callable[[dict[str, Any]], str]:
        return lambda row: _milliseconds(row["methods"][method or row["best"]]["seconds"])

    return [
        column("cluster", lambda row: row["cluster"]),
        column("ranks", lambda row: f"{row['world_size']:,}"),
        column("attention ms", lambda row: _milliseconds(row["attention_seconds"])),
        column("best tree", lambda row: row["best"]),
        column("its ms", milliseconds("")),
        column("ring ms", milliseconds(RING)),
        column("ring /best", lambda row: f"{row['ring_over_tree']:,.0f}"),
        column("passing queries, ms", milliseconds(RING_PASS_Q)),
        column("it /best", lambda row: f"{row['pass_q_over_tree']:,.2f}"),
        column("3 all-reduces, ms", milliseconds("three_allreduce")),
        column("they /best", lambda row: f"{row['published_over_tree']:,.2f}"),
        column("bytes right", lambda row: "WRONG" if row["wrong"] else "yes"),
    ]


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


def memory_sentences() -> list[str]:
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
