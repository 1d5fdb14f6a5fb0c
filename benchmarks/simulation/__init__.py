# SPDX-License-Identifier: BSD-3-Clause
"""Simulated clusters: what every exchange and both rings take on networks that are not at hand.

`fabric` moves messages over links with latency, bandwidth and queues; `collectives` are those of
Gloo and NCCL; `programs` do what the strategies and rings of this library do, message by message;
`clusters` holds constants and where they come from; `study` and `validation` make the tables.
"""

from .clusters import CLUSTERS, Cluster, from_costs
from .fabric import Fabric, Level, Network, Relay
from .programs import RING, RING_PASS_Q, Problem, Run, simulate, ways

__all__ = [
    "CLUSTERS",
    "RING",
    "RING_PASS_Q",
    "Cluster",
    "Fabric",
    "Level",
    "Network",
    "Problem",
    "Relay",
    "Run",
    "from_costs",
    "simulate",
    "ways",
]
