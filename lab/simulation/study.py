# SPDX-License-Identifier: BSD-3-Clause
"""Trees against rings by context and by ranks: what is simulated, and the reports."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from rich.progress import Progress

from benchmarks.harness.report import Column, Report, columns_of, environment, verdict
from tree_attention.exchange.strategies import STRATEGIES, strategies

from .clusters import CLUSTERS
from .headlines import FIGURE_3, FIGURE_3_KEYS, TITLE, headline_columns, sentences
from .problem import Problem
from .rings import RING, RING_PASS_Q
from .steps import bytes_of_formula, methods, simulate

HEADS = (16, 16)  # of the paper's figures
CONTEXTS = (80_000, 320_000, 1_280_000, FIGURE_3_KEYS)  # of all ranks together
BATCH_CONTEXTS = (80_000, FIGURE_3_KEYS)  # of each sequence of a batch
RANKS = (*FIGURE_3, 512, 1024, 4096)
BATCHES = (1, 16, 64)
CANONICAL = tuple(name for name in strategies() if STRATEGIES[name].is_canonical)

Setting = tuple[str, int, int, int]  # cluster, ranks, keys of all ranks, batch


def cases(clusters: Sequence[str], ranks: Sequence[int]) -> list[Setting]:
    """Contexts and batches on worlds up to the paper's, the longest context on all."""
    result = []
    for cluster in clusters:
        for world_size in ranks:
            contexts = CONTEXTS if world_size <= FIGURE_3[-1] else CONTEXTS[-1:]
            result += [(cluster, world_size, keys, 1) for keys in contexts]
            if world_size <= FIGURE_3[-1]:
                result += [
                    (cluster, world_size, keys, batch)
                    for batch in BATCHES[1:]
                    for keys in BATCH_CONTEXTS
                ]
    return result


def run_case(case: Setting) -> dict[str, Any]:
    name, world_size, keys, batch = case
    cluster = CLUSTERS[name]
    problem = Problem(keys // world_size, batch, HEADS)
    topology = cluster.topology(world_size)
    results: dict[str, dict[str, Any]] = {}
    for method in methods():
        run = simulate(method, problem, cluster, world_size)
        formula = bytes_of_formula(method, problem, topology)
        results[method] = {
            "seconds": run.seconds,
            "bytes_sent": int(run.bytes_sent.max()),
            "messages_sent": int(run.messages_sent.max()),
            "formula_bytes": formula,
            "network": run.network,
        }
    times = {method: result["seconds"] for method, result in results.items()}
    best = min(CANONICAL, key=times.__getitem__)
    attention = problem.kv_bytes / cluster.key_bandwidth
    return {
        "name": f"{name} p={world_size} B={batch} {keys}",
        "cluster": name,
        "world_size": world_size,
        "keys": keys,
        "batch": batch,
        "methods": results,
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


def run(chosen: Sequence[Setting], progress: Progress) -> tuple[Report, Report]:
    """The paper's cases and larger worlds; and every strategy in every case."""
    begin = time.perf_counter()
    task = progress.add_task("simulate", total=len(chosen))
    rows = []
    for case in chosen:
        progress.update(task, description=f"{case[0]} p={case[1]}")
        rows.append(run_case(case))
        progress.advance(task)
    names = dict.fromkeys(case[0] for case in chosen)
    headlines = [row for row in rows if row["batch"] == 1 and row["keys"] == FIGURE_3_KEYS]
    main = Report(
        name="simulation",
        title=TITLE,
        notes=NOTES,
        environment=environment(),
        rows=[{k: v for k, v in row.items() if k != "methods"} for row in headlines],
        columns=headline_columns(headlines),
        summary=[
            *sentences(rows),
            *(f"{name}: {CLUSTERS[name].source}." for name in names),
            f"Simulated in {time.perf_counter() - begin:.0f} s.",
        ],
    )
    return main, strategies_report(rows)


NOTES = (
    "A row is one decoding step of one layer: cluster, ranks p, batch B, keys of all ranks "
    "together; 16 query and key heads of 128 in bfloat16, so rings carry no more than the paper's. "
    "Times are from the last rank's start to the last one's result, attention included.",
    "The best tree is the fastest of the strategies that give the same bits on every rank; the "
    "ratios are the times of the rings and of the paper's three all-reduces over its.",
)


def strategies_report(rows: list[dict[str, Any]]) -> Report:
    return Report(
        name="simulation_strategies",
        title="Simulated decoding steps: every strategy and both rings",
        notes=(
            *NOTES,
            "Every rank's messages are those that its own code handed to a link. bytes right "
            "compares what the busiest rank sent with the strategy's own formula (all-reduces by "
            "NCCL's tree excepted).",
        ),
        environment=environment(),
        rows=rows,
        columns=columns(rows),
    )


def columns(rows: Sequence[dict[str, Any]]) -> list[Column]:
    def microseconds(method: str, row: dict[str, Any]) -> str:
        return f"{1e6 * row['methods'][method]['seconds']:,.0f}"

    return columns_of(
        rows,
        {
            "case": lambda row: row["name"],
            "attention us": lambda row: f"{1e6 * row['attention_seconds']:,.0f}",
            **{f"{method} us": partial(microseconds, method) for method in methods()},
            "best": lambda row: row["best"],
            "ring /best": lambda row: f"{row['ring_over_tree']:,.1f}",
            "passing /best": lambda row: f"{row['pass_q_over_tree']:,.2f}",
            "paper's /best": lambda row: f"{row['published_over_tree']:.2f}",
            "bytes right": verdict,
        },
    )
