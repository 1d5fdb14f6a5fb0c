# SPDX-License-Identifier: BSD-3-Clause
"""Simulated clusters: what every exchange and both rings take on networks that are not at hand.

`fabric` moves messages over links with latency, bandwidth and queues; `collectives` are those of
Gloo and NCCL; `recording` learns what a strategy does by running it with a link that records, and
`steps` replays that; `rings` does what the rings do; `clusters` holds constants and where they come
from; `study` makes the tables. Two are arithmetic: `parallelism` tabulates which split of a model
pays where, and `schedule` which block of a GPU reads which keys.
"""

from .clusters import CLUSTERS, SimulatedCluster
from .fabric import Fabric, Level, SimulatedNetwork
from .problem import Problem
from .rings import RING, RING_PASS_Q, RINGS
from .steps import Run, bytes_of_formula, methods, simulate, step_bytes

__all__ = [
    "CLUSTERS",
    "RING",
    "RINGS",
    "RING_PASS_Q",
    "Fabric",
    "Level",
    "Problem",
    "Run",
    "SimulatedCluster",
    "SimulatedNetwork",
    "bytes_of_formula",
    "methods",
    "simulate",
    "step_bytes",
]
