# SPDX-License-Identifier: BSD-3-Clause
"""One configuration of an emulated cluster: links, calibration and what its ranks report."""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.machine import softirq_seconds
from benchmarks.harness.measure import Load
from benchmarks.harness.places import places_parser
from benchmarks.harness.report import environment
from tree_attention import lean_decode
from tree_attention._environment import COSTS_VARIABLE
from tree_attention.exchange.transport.topology import Topology

from ..simulation import bytes_of_formula
from .fake_attention import DTYPE, HEAD_DIM, NUM_HEADS, NUM_HEADS_KV, problem_of
from .hosts import EmulatedCluster, exit_on_sigterm
from .network import unsupported
from .probe import probe, spread
from .wiring import LINKS, Wiring

CALIBRATION_SECONDS = 1.0  # for each strategy and size


def run(
    wiring: Wiring, world_size: int, program: Sequence[str], specification: dict[str, Any]
) -> dict[str, Any]:
    """Return what the ranks of a configuration report, as "results", and what it is like.

    `tree_attention calibrate` runs there first, and every rank goes by what it measured. `program`
    is a module, and its options, that is given the files of its specification and for rank 0's
    results.
    """
    with tempfile.TemporaryDirectory() as folder:
        spec, out, costs = (Path(folder) / f"{name}.json" for name in ("spec", "out", "costs"))
        spec.write_text(json.dumps(specification))
        variables = {"OMP_NUM_THREADS": "1"}
        before, packets = os.times(), softirq_seconds()
        with Load() as load, EmulatedCluster(wiring, world_size) as cluster:
            near_and_far = {wiring.link(0, other): other for other in (1, world_size - 1)}
            probes = [probe(cluster, 0, other) for other in near_and_far.values()]
            command = [sys.executable, "-m", "tree_attention", "calibrate"]
            command += ["--seconds", str(CALIBRATION_SECONDS), "--out", str(costs)]
            _run(cluster, command, variables, quiet=True)
            variables[COSTS_VARIABLE] = str(costs)
            _run(cluster, [sys.executable, "-m", *program, str(spec), str(out)], variables)
        after = os.times()
        results = json.loads(out.read_text())
        constants = json.loads(costs.read_text())
    # Seconds of the relay and the ranks, all of which have ended, and of the kernel for packets.
    ours = sum(after[2:4]) - sum(before[2:4]) + softirq_seconds() - packets
    share = ours / (os.cpu_count() or 1) / (after.elapsed - before.elapsed)
    return {
        "results": results,
        "costs": constants,
        "links": [
            {
                "link": str(wiring.link(*p.hosts)),
                "round_trip_ms": [1e3 * t for t in spread(p.rtts)],
                "gbit_per_second": [rate / 1e9 for rate in spread(p.rates)],
            }
            for p in probes
        ],
        "other_load": None if load.busy is None else max(0.0, load.busy - share),
        "seconds": after.elapsed - before.elapsed,
        "environment": environment(),
    }


def run_cases(
    link: str, world_size: int, cases: Sequence[dict[str, Any]], seconds: float
) -> dict[str, Any]:
    """Decoding steps: the configuration, with a row for each case."""
    spec = {"cases": cases, "seconds": seconds}
    part = run(LINKS[link], world_size, ["lab.emulation.rank"], spec)
    results = zip(cases, part.pop("results"), strict=True)
    return {"rows": [row_of(link, world_size, case, methods) for case, methods in results], **part}


def row_of(
    link: str, world_size: int, case: dict[str, Any], methods: dict[str, Any]
) -> dict[str, Any]:
    """A case with what was measured, and the bytes that each method's formula says."""
    for method in methods.values():
        method["p10"], method["median"], method["p90"] = spread(method["seconds"])
    problem, topology = problem_of(case["batch"], case["keys"]), topology_of(link, world_size)
    for name, method in methods.items():
        strategy = method.get("chosen", name)
        method["formula_bytes"] = bytes_of_formula(strategy, problem, topology)
    return {
        "name": f"{link} p={world_size} B={case['batch']} n={case['keys']}",
        "link": link,
        "world_size": world_size,
        **{name: case[name] for name in ("batch", "keys", "seconds_per_key")},
        "methods": methods,
        "wrong": not all(
            method["right"] and method["bytes"] == method["formula_bytes"]
            for method in methods.values()
        ),
    }


def topology_of(link: str, world_size: int) -> Topology:
    return Topology.of([LINKS[link].node(rank) for rank in range(world_size)])


@functools.cache
def attention_seconds_per_key(keys: int = 8192) -> float:
    """Seconds per key of one sequence on one thread, with keys and values read from memory."""
    torch.set_num_threads(1)
    q = torch.randn(1, NUM_HEADS, 1, HEAD_DIM).to(DTYPE)
    k, v = torch.randn(2, 1, NUM_HEADS_KV, keys, HEAD_DIM).to(DTYPE)
    times = []
    for _ in range(15):
        begin = time.perf_counter()
        lean_decode(q, k, v)
        times.append(time.perf_counter() - begin)
    return statistics.median(times) / keys


def _run(
    cluster: EmulatedCluster, command: Sequence[str], variables: dict[str, str], quiet: bool = False
) -> None:
    status = cluster.run(command, variables, quiet=quiet)
    if status:
        raise SystemExit(f"{' '.join(command)}: a rank ended with status {status}")


def configurations(links: Sequence[str], worlds: Sequence[int]) -> list[str]:
    return [f"{link}/{world}" for link in links for world in worlds]


def emulated_parser(program: str, report: str, names: Sequence[str]) -> argparse.ArgumentParser:
    """The options of a program that measures configurations of emulated clusters."""
    return places_parser(f"lab.emulation.{program}", report, names)


def where_emulated(measured: Callable[[], int]) -> int:
    """Call a program where hosts can be emulated; else say why not. Return its exit status."""
    if (why := unsupported()) is not None:
        print(why, file=sys.stderr)
        return 2
    exit_on_sigterm()
    return measured()
