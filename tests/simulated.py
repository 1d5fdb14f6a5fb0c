# SPDX-License-Identifier: BSD-3-Clause
"""Small networks and clusters for tests of the simulation."""

from __future__ import annotations

from benchmarks.simulation import Cluster, Level, Network
from benchmarks.simulation.fabric import EVERYBODY


def one_level(**options: object) -> Network:
    """A second of latency, 10 bytes per second."""
    return Network("test", (Level(EVERYBODY, 1.0, 10.0),), **options)  # type: ignore[arg-type]


def cluster_of(network: Network, ranks_per_node: int = 1) -> Cluster:
    infinite = float("inf")
    return Cluster("test", "", ranks_per_node, (network,), 0.0, 0.0, infinite, infinite)
