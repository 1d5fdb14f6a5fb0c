# SPDX-License-Identifier: BSD-3-Clause
"""Strategies and rings on emulated clusters, beside the cost model: needs root.

    sudo .venv/bin/python -m benchmarks.bench_cluster --out DIR

Configurations are LINK/RANKS; --only takes some of them, and DIR/cluster.json keeps the rows of the
others from earlier runs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from tree_attention import lean_decode, strategies
from tree_attention.bench.measure import Load, load_warnings
from tree_attention.bench.report import Report, environment, print_report, write
from tree_attention.exchange.costs import Costs

from .cluster import LINKS, Cluster, unsupported
from .cluster.probe import probe, spread
from .cluster_model import costs_of, work_of
from .cluster_rank import DTYPE, HEAD_DIM, NUM_HEADS, NUM_HEADS_KV, RINGS
from .cluster_report import NOTES, columns, draw, summary

WORLDS = (2, 4, 8)
CALIBRATED = 4  # ranks
BATCHES = (1, 16, 64)
RING_TOKENS = 1024  # of a rank's shard, all sequences together, where strategies are compared
CONTEXTS = (64, 512, 2048, 8192, 32768)  # keys per rank where trees and rings are compared
TREE = "all_gather"
LARGEST_RING_BYTES = 1 << 28  # that a rank sends in one call; longer contexts are for the model


def cases(world_size: int, seconds_per_key: float) -> list[dict[str, Any]]:
    steps = [
        {
            "part": "step",
            "batch": batch,
            "keys": RING_TOKENS // batch,
            "seconds_per_key": 0.0,
            "ways": [*strategies(), *RINGS],
        }
        for batch in BATCHES
    ]
    shard = 2 * NUM_HEADS_KV * HEAD_DIM * DTYPE.itemsize
    contexts = [
        {
            "part": "context",
            "batch": 1,
            "keys": keys,
            "seconds_per_key": seconds_per_key,
            "ways": [TREE, *RINGS],
        }
        for keys in CONTEXTS
        if (world_size - 1) * keys * shard <= LARGEST_RING_BYTES
    ]
    return steps + contexts


def attention_seconds_per_key(keys: int = 8192) -> float:
    """Of one sequence on one thread, keys and values from memory."""
    torch.set_num_threads(1)
    q = torch.randn(1, NUM_HEADS, 1, HEAD_DIM).to(DTYPE)
    k, v = torch.randn(2, 1, NUM_HEADS_KV, keys, HEAD_DIM).to(DTYPE)
    times = []
    for _ in range(15):
        begin = time.perf_counter()
        lean_decode(q, k, v)
        times.append(time.perf_counter() - begin)
    return statistics.median(times) / keys


def run(link: str, world_size: int, seconds: float, seconds_per_key: float) -> dict[str, Any]:
    """Measures one configuration."""
    wiring = LINKS[link]
    chosen = cases(world_size, seconds_per_key)
    calibrate = wiring.inside is None and world_size == CALIBRATED
    with tempfile.TemporaryDirectory() as folder:
        spec, out = Path(folder) / "spec.json", Path(folder) / "out.json"
        content = {"cases": chosen, "seconds": seconds, "calibrate": calibrate}
        spec.write_text(json.dumps(content))
        before, packets = os.times(), softirq_seconds()
        with Load() as load, Cluster(wiring, world_size) as cluster:
            near_and_far = {wiring.link(0, other): other for other in (1, world_size - 1)}
            probes = [probe(cluster, 0, other) for other in near_and_far.values()]
            program = [sys.executable, "-m", "benchmarks.cluster_rank", str(spec), str(out)]
            status = cluster.run(program, {"OMP_NUM_THREADS": "1"})
            if status:
                raise SystemExit(f"{link}/{world_size}: a rank ended with status {status}")
        after = os.times()
        results = json.loads(out.read_text())["cases"]
        costs = None
        if calibrate:
            costs = asdict(Costs.load(out.with_suffix(".costs.json")))
    rows = [
        {
            "name": f"{link} p={world_size} B={case['batch']} n={case['keys']}",
            "link": link,
            "world_size": world_size,
            **{name: case[name] for name in ("part", "batch", "keys", "seconds_per_key")},
            "ways": ways,
            "wrong": not all(way["right"] for way in ways.values()),
        }
        for case, ways in zip(chosen, results, strict=True)
    ]
    measured = [
        {
            "link": str(wiring.link(*p.hosts)),
            "round_trip_ms": [1e3 * t for t in spread(p.rtts)],
            "gbit_per_second": [rate / 1e9 for rate in spread(p.rates)],
        }
        for p in probes
    ]
    # Of the relay and the ranks, all of which have ended, and of the kernel for their packets.
    ours = sum(after[2:4]) - sum(before[2:4]) + softirq_seconds() - packets
    share = ours / (os.cpu_count() or 1) / (after.elapsed - before.elapsed)
    others = None if load.busy is None else max(0.0, load.busy - share)
    return {"rows": rows, "costs": costs, "links": measured, "other_load": others}


def softirq_seconds() -> float:
    """CPU time that the kernel has spent on what belongs to no process."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    return int(fields[7]) / os.sysconf("SC_CLK_TCK")


def add_predictions(row: dict[str, Any], costs: Costs | None) -> None:
    """The model's time and the formulas' counts, to each way of a row."""
    attention = row["seconds_per_key"] * row["batch"] * row["keys"]
    for name, way in row["ways"].items():
        work = work_of(
            name, LINKS[row["link"]], row["world_size"], row["batch"], row["keys"], attention
        )
        way["predicted_seconds"] = None if costs is None else work.seconds(costs)
        way["formula_bytes"], way["formula_rounds"] = work.bytes_sent, work.rounds
        tenth, median, ninetieth = spread(way["seconds"])
        way |= {"p10": tenth, "median": median, "p90": ninetieth}
        row["wrong"] |= (way["bytes"], way["rounds"]) != (work.bytes_sent, work.rounds)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_cluster")
    names = [f"{link}/{world}" for link in LINKS for world in WORLDS]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="LINK/RANKS")
    parser.add_argument(
        "--seconds", type=float, default=0.5, help="for each way of each case (default 0.5)"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="write cluster.{json,md,png} there")
    parsed = parser.parse_args(arguments)
    if (why := unsupported()) is not None:
        print(why, file=sys.stderr)
        return 2
    measured = {}
    if parsed.out is not None and (parsed.out / "cluster.json").exists():
        measured = load_parts(parsed.out / "cluster.json")
    seconds_per_key = attention_seconds_per_key()
    for name in parsed.only:
        link, world = name.split("/")
        print(name, file=sys.stderr, flush=True)
        part = run(link, int(world), parsed.seconds, seconds_per_key)
        measured[name] = {"environment": environment(), **part}
    report = report_of({name: measured[name] for name in names if name in measured})
    print_report(Console() if sys.stdout.isatty() else Console(width=150), report)
    if parsed.out is not None:
        print("Written:", *write(report, parsed.out))
    return 1 if report.wrong else 0


def load_parts(path: Path) -> dict[str, Any]:
    """What earlier runs measured, by configuration."""
    content = json.loads(path.read_text())
    parts = {name: {**part, "rows": []} for name, part in content["configurations"].items()}
    for row in content["rows"]:
        parts[f"{row['link']}/{row['world_size']}"]["rows"].append(row)
    return parts


def report_of(measured: dict[str, Any]) -> Report:
    calibrated = {
        LINKS[name.split("/")[0]]: Costs(**part["costs"])
        for name, part in measured.items()
        if part["costs"] is not None
    }
    rows = []
    for part in measured.values():
        for row in part["rows"]:
            add_predictions(row, costs_of(LINKS[row["link"]], calibrated))
            rows.append(row)
    return Report(
        name="cluster",
        title="Strategies and rings on emulated clusters",
        notes=NOTES,
        environment=environment(configurations=", ".join(measured)),
        rows=rows,
        columns=columns(rows),
        summary=summary(rows, measured),
        warnings=load_warnings([part["other_load"] for part in measured.values()]),
        more={
            "configurations": {
                name: {key: value for key, value in part.items() if key != "rows"}
                for name, part in measured.items()
            }
        },
        draw=draw,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
