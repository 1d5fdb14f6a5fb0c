# SPDX-License-Identifier: BSD-3-Clause
"""Numbers of docs/estimate.html, out of the planner's tables and of messages that were recorded."""

import json
from dataclasses import asdict
from typing import Any

from benchmarks.harness.tree_allreduce import strategy_of
from benchmarks.simulation.clusters import CLUSTERS
from benchmarks.simulation.fabric import Fabric, Floats, Ints, Route
from benchmarks.simulation.problem import Problem
from benchmarks.simulation.recording import program_of
from benchmarks.simulation.rings import RING, RING_PASS_Q, RINGS, SimulatedRanks
from benchmarks.simulation.steps import replay
from tree_attention.planning import arithmetic, machines, models

EMPTY = '<script id="tables" type="application/json"></script>'
CLUSTER, METHODS = "lan", {"tree": "butterfly", "pass-Q": RING_PASS_Q, "ring": RING}
KEYS, RANKS = (1 << 10, 1 << 13, 1 << 16), (2, 4, 8)


class RecordingFabric(Fabric):
    """Keeps each message: its ranks, its bytes, and the microseconds of its way."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.messages: list[tuple[int, ...]] = []

    def send(
        self, route: Route, num_bytes: int | Ints, awaited: Floats | None = None
    ) -> tuple[Floats, Floats]:
        begins = self.now[route.sources]
        left, arrived = super().send(route, num_bytes, awaited)
        sizes = route.sources * 0 + num_bytes
        times = (1e6 * begins, 1e6 * arrived)
        rows = (x.round().astype(int) for x in (route.sources, route.targets, sizes, *times))
        self.messages += zip(*(x.tolist() for x in rows), strict=True)
        return left, arrived


def step(method: str, problem: Problem, world_size: int) -> dict[str, Any]:
    """Return the messages of a decoding step, and its microseconds."""
    cluster = CLUSTERS[CLUSTER]
    ranks = SimulatedRanks(problem, cluster, RecordingFabric(cluster.networks[0], world_size))
    if method in RINGS:
        RINGS[method].run(ranks)
    else:
        ranks.attend()
        ranks.begin()
        topology = cluster.topology(world_size)
        replay(program_of(strategy_of(method), problem.layout, topology, problem.dtype), ranks)
    return {
        "messages": sorted(ranks.fabric.messages, key=lambda x: x[3]),
        "end": round(1e6 * float(ranks.fabric.now.max())),
    }


def steps() -> dict[str, Any]:
    """Return a step by each method, for numbers of ranks and of keys on each."""
    return {
        f"{p} {keys}": {name: step(x, Problem(keys), p) for name, x in METHODS.items()}
        for p in RANKS
        for keys in KEYS
    }


def dense(model: models.Model) -> dict[str, Any]:
    """Return the numbers of a model as the page's arithmetic takes them."""
    (attention,) = model.attention
    if attention.window or attention.latent or model.weights.experts or model.states_bytes:
        raise ValueError(f"docs/estimate.html has no arithmetic for {model.name}")
    return {**asdict(model), "attention": asdict(attention), "weights": asdict(model.weights)}


def tables() -> str:
    constants = {
        name: getattr(arithmetic, name) for name in ("FORMS", "TENSOR", "DATA", "MAX_CONTEXT")
    }
    return json.dumps(
        {
            **constants,
            "BF16": models.BF16,
            "FP32": models.FP32,
            "CHUNK": arithmetic.Work(1).chunk,
            "SUSTAINED": machines.SUSTAINED,
            "models": {name: dense(model) for name, model in models.NAMED.items()},
            "machines": {name: asdict(x) for name, x in machines.MACHINES.items()},
            "links": {name: asdict(x) for name, x in machines.LINKS.items()},
            "kv_dtypes": models.KV_DTYPES,
            "weight_dtypes": models.WEIGHT_DTYPES,
            "steps": steps(),
        },
        separators=(",", ":"),
    )


def filled(page: str) -> str:
    """Put the numbers into the page."""
    return page.replace(EMPTY, EMPTY.replace("></", f">{tables()}</"), 1)
