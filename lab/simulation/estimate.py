# SPDX-License-Identifier: BSD-3-Clause
"""Messages of decoding steps on a simulated cluster, which docs/estimate.html draws.

python -m lab.simulation.estimate        # writes docs/estimate_steps.json
"""

import json
from typing import Any

from benchmarks.harness.report import ROOT
from lab.papers.tree_allreduce import strategy_of
from lab.simulation.clusters import CLUSTERS
from lab.simulation.fabric import Fabric, Floats, Ints, Route
from lab.simulation.problem import Problem
from lab.simulation.recording import program_of
from lab.simulation.rings import RING, RING_PASS_Q, RINGS, SimulatedRanks
from lab.simulation.steps import replay

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
    fabric = RecordingFabric(cluster.networks[0], world_size)
    ranks = SimulatedRanks(problem, cluster, fabric)
    if method in RINGS:
        RINGS[method].run(ranks)
    else:
        ranks.attend()
        ranks.begin()
        topology = cluster.topology(world_size)
        replay(program_of(strategy_of(method), problem.layout, topology, problem.dtype), ranks)
    return {
        "messages": sorted(fabric.messages, key=lambda x: x[3]),
        "end": round(1e6 * float(fabric.now.max())),
    }


def steps() -> dict[str, Any]:
    """Return a step by each method, for numbers of ranks and of keys on each."""
    return {
        f"{p} {keys}": {name: step(x, Problem(keys), p) for name, x in METHODS.items()}
        for p in RANKS
        for keys in KEYS
    }


def as_json() -> str:
    return json.dumps(steps(), separators=(",", ":")) + "\n"


if __name__ == "__main__":
    (ROOT / "docs/estimate_steps.json").write_text(as_json())
