# SPDX-License-Identifier: BSD-3-Clause
"""Small networks and clusters for tests of the simulation."""

from __future__ import annotations

from lab.simulation import Level, SimulatedCluster, SimulatedNetwork
from lab.simulation.fabric import EVERYBODY


def one_level(**options: object) -> SimulatedNetwork:
    """A second of latency, 10 bytes per second."""
    return SimulatedNetwork("test", (Level(EVERYBODY, 1.0, 10.0),), **options)  # type: ignore[arg-type]


def cluster_of(network: SimulatedNetwork, ranks_per_node: int = 1) -> SimulatedCluster:
    infinite = float("inf")
    return SimulatedCluster("test", "", ranks_per_node, (network,), 0.0, 0.0, infinite, infinite)
