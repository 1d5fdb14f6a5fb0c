# SPDX-License-Identifier: BSD-3-Clause
"""Trees against rings by context and by ranks: rows, tables and pictures."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.progress import Progress

from ...exchange.strategies import STRATEGIES, strategies
from ..report import Column, Report, environment
from .clusters import Cluster
from .programs import RING, RING_PASS_Q, Problem, bytes_of_formula, simulate, ways
from .published import (
    FIGURE_3,
    FIGURE_3_KEYS,
    FIGURE_3_RATIO,
    comparisons,
    overhead_that_explains,
)

HEADS = (16, 16)  # of the paper's figures
CONTEXTS = (80_000, 320_000, 1_280_000, 5_120_000)  # of all ranks together
RANKS = (8, 64, 128, 512, 4096)
BATCHES = (1, 16, 64)
CANONICAL = tuple(name for name in strategies() if STRATEGIES[name].is_canonical)

Case = tuple[str, int, int, int]  # cluster, ranks, keys of all ranks, batch


def cases(clusters: Sequence[str], ranks: Sequence[int]) -> list[Case]:
    """Contexts and batches on worlds up to the paper's, the longest context on all."""
    result = []
    for cluster in clusters:
        for world_size in ranks:
            contexts = CONTEXTS if world_size <= FIGURE_3[-1] else CONTEXTS[-1:]
            result += [(cluster, world_size, keys, 1) for keys in contexts]
            if world_size <= FIGURE_3[-1]:
                result += [(cluster, world_size, CONTEXTS[-1], batch) for batch in BATCHES[1:]]
    return result


def run_case(case: Case, clusters: dict[str, Cluster]) -> dict[str, Any]:
    name, world_size, keys, batch = case
    cluster = clusters[name]
    problem = Problem(keys // world_size, batch, HEADS)
    topology = cluster.topology(world_size)
    results: dict[str, dict[str, Any]] = {}
    for way in ways():
        run = simulate(way, problem, cluster, world_size)
        formula = bytes_of_formula(way, problem, topology)
        results[way] = {
            "seconds": run.seconds,
            "bytes_sent": int(run.bytes_sent.max()),
            "messages_sent": int(run.messages_sent.max()),
            "formula_bytes": formula,
            "network": run.network,
        }
    times = {way: result["seconds"] for way, result in results.items()}
    best = min(CANONICAL, key=times.__getitem__)
    attention = problem.kv_bytes / cluster.key_bandwidth
    return {
        "name": f"{name} p={world_size} B={batch} {keys}",
        "cluster": name,
        "world_size": world_size,
        "keys": keys,
        "batch": batch,
        "ways": results,
        "attention_seconds": attention,
        "best": best,
        "ring_over_tree": times[RING] / times[best],
        "pass_q_over_tree": times[RING_PASS_Q] / times[best],
        "published_over_tree": times["three_allreduce"] / times[best],
        # A tree all-reduce is NCCL's own affair; all else sends what the formulas say.
        "wrong": any(
            result["bytes_sent"] != result["formula_bytes"]
            for result in results.values()
            if "tree" not in result["network"]
        ),
    }


def memory_elements(keys_per_rank: int, batch: int, heads: int, head_dim: int) -> tuple[int, int]:
    """Peak memory of (tree, ring) on a rank, in elements: Eq. 8 and 9 of the paper."""
    width = heads * head_dim
    kv = 2 * batch * keys_per_rank * width
    return kv + 2 * batch * width + 2 * batch * heads, 2 * kv + 2 * batch * width


def run(chosen: Sequence[Case], clusters: dict[str, Cluster], progress: Progress) -> Report:
    begin = time.perf_counter()
    task = progress.add_task("simulate", total=len(chosen) + 1)
    rows = []
    for case in chosen:
        progress.update(task, description=f"{case[0]} p={case[1]}")
        rows.append(run_case(case, clusters))
        progress.advance(task)
    published = comparisons()
    progress.advance(task)
    names = dict.fromkeys(case[0] for case in chosen)
    return Report(
        name="simulation",
        title="Simulated decoding steps: tree against ring",
        notes=NOTES,
        environment=environment(),
        rows=rows,
        columns=columns(rows),
        summary=[
            *(f"{name}: {clusters[name].source}." for name in names),
            *summary(rows),
            *memory_sentences(),
            *published_sentences(published),
            f"Simulated in {time.perf_counter() - begin:.0f} s.",
        ],
        more={"published": [vars(c) | {"error": c.error} for c in published]},
        draw=draw,
    )


NOTES = (
    "A row is one decoding step of one layer: cluster, ranks p, batch B, keys of all ranks "
    "together; 16 query and key heads of 128 in bfloat16, so rings carry no more than the paper's. "
    "Times are from all ranks' common start to the last one's result, attention included.",
    "best is the fastest of the strategies that give the same bits on every rank; the ratios are "
    "the times of the rings and of the paper's three all-reduces over its.",
    "Every rank's messages follow the library's own programs; bytes right compares what the "
    "busiest rank sent with the formulas of the cost model (all-reduces by NCCL's tree excepted).",
)


def columns(rows: Sequence[dict[str, Any]]) -> list[Column]:
    def column(heading: str, text: Callable[[dict[str, Any]], str]) -> Column:
        return Column(heading, [text(row) for row in rows])

    def microseconds(way: str) -> Callable[[dict[str, Any]], str]:
        return lambda row: f"{1e6 * row['ways'][way]['seconds']:,.0f}"

    return [
        column("case", lambda row: row["name"]),
        column("attention us", lambda row: f"{1e6 * row['attention_seconds']:,.0f}"),
        *(column(f"{way} us", microseconds(way)) for way in ways()),
        column("best", lambda row: row["best"]),
        column("ring /best", lambda row: f"{row['ring_over_tree']:,.1f}"),
        column("passing /best", lambda row: f"{row['pass_q_over_tree']:,.2f}"),
        column("paper's /best", lambda row: f"{row['published_over_tree']:.2f}"),
        column("bytes right", lambda row: "WRONG" if row["wrong"] else "yes"),
    ]


def summary(rows: Sequence[dict[str, Any]]) -> list[str]:
    result = []
    for cluster in dict.fromkeys(row["cluster"] for row in rows):
        of_cluster = [row for row in rows if row["cluster"] == cluster]
        ratios = sorted(row["ring_over_tree"] for row in of_cluster)
        wins: dict[str, list[str]] = {}
        for row in of_cluster:
            label = f"p={row['world_size']} B={row['batch']}"
            if label not in wins.setdefault(row["best"], []):
                wins[row["best"]].append(label)
        slower = [row["name"] for row in of_cluster if row["ring_over_tree"] < 1]
        result.append(
            f"{cluster}: the best tree is {ratios[0]:,.1f} to {ratios[-1]:,.0f} times as fast as "
            f"the ring{' (slower in: ' + ', '.join(slower) + ')' if slower else ''}; fastest: "
            + "; ".join(f"{best} at {', '.join(labels)}" for best, labels in wins.items())
            + "."
        )
    return result


def memory_sentences() -> list[str]:
    result = []
    for hidden in (2048, 4096):
        tree, ring = memory_elements(64_000, 1, hidden // 128, 128)
        result.append(
            f"Peak memory (Eq. 8, 9), hidden size {hidden}, 64,000 keys per rank, 2 bytes per "
            f"element: tree {2e-6 * tree:,.1f} MB, ring {2e-6 * ring:,.1f} MB, ring - tree "
            f"{2e-6 * (ring - tree):,.1f} MB; Figure 4 measured {524 if hidden == 2048 else 1040} "
            "MB."
        )
    return result


def published_sentences(published: Sequence[Any]) -> list[str]:
    result = []
    for c in published:
        paper = "no number" if c.published is None else f"{c.published:,.2f} {c.unit}"
        error = "" if c.error is None else f", relative error {c.error:+.0%}"
        result.append(f"{c.what}: simulated {c.simulated:,.2f} {c.unit}, paper {paper}{error}.")
    largest = published[len(FIGURE_3) - 1]
    seconds = overhead_that_explains(largest.tree_seconds, largest.ring_seconds, FIGURE_3_RATIO)
    result.append(
        f"Figure 3's x8 would need {1e3 * seconds:,.0f} ms of fixed overhead in both arms: links "
        "and memory alone make the ratio far larger."
    )
    return result


def draw(report: Report, path: Path) -> None:
    """The shapes of the paper's figures 3 and 4, and the strategies by ranks."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(dict.fromkeys(row["cluster"] for row in report.rows))
    figure, grid = pyplot.subplots(len(names), 3, figsize=(15, 3.9 * len(names)), squeeze=False)
    for name, (contexts, ranks, exchanges) in zip(names, grid, strict=True):
        rows = [row for row in report.rows if row["cluster"] == name and row["batch"] == 1]
        reference = rows[0]["ways"][RING]["seconds"]
        for world_size in [p for p in FIGURE_3 if any(row["world_size"] == p for row in rows)]:
            of_world = [row for row in rows if row["world_size"] == world_size]
            keys = [row["keys"] for row in of_world]
            for way, line in (("best", "-o"), (RING, "--s")):
                times = [
                    row["ways"][row["best"] if way == "best" else way]["seconds"] / reference
                    for row in of_world
                ]
                label = f"{'best tree' if way == 'best' else way}, {world_size} ranks"
                contexts.plot(keys, times, line, label=label)
        _label(
            contexts,
            f"{name}: by context",
            "keys of all ranks",
            "time / the ring's at the first point",
        )
        longest = [row for row in rows if row["keys"] == FIGURE_3_KEYS]
        worlds = [row["world_size"] for row in longest]
        for i, way in enumerate(ways()):
            style = {"color": f"C{i}", "markersize": 3}
            times = [1e3 * row["ways"][way]["seconds"] for row in longest]
            if way == RING:
                ranks.plot(worlds, times, "--s", label=f"{way} (others: at right)", **style)
                continue
            ranks.plot(worlds, times, "-o", **style)
            only = [
                1e6 * (row["ways"][way]["seconds"] - row["attention_seconds"]) for row in longest
            ]
            exchanges.plot(worlds, only, "-o", label=way, **style)
        _label(ranks, f"{name}: {FIGURE_3_KEYS:,} keys", "ranks", "milliseconds")
        _label(exchanges, f"{name}: without attention", "ranks", "microseconds")
    figure.tight_layout()
    figure.savefig(path, dpi=65)
    pyplot.close(figure)


def _label(axes: Any, title: str, x: str, y: str) -> None:
    axes.set(xscale="log", yscale="log", xlabel=x, ylabel=y)
    axes.set_title(title, fontsize=10, loc="left")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
