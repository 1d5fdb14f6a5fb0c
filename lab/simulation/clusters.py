# SPDX-License-Identifier: BSD-3-Clause
"""Named clusters: constants of links, libraries and processors, and where they come from.

A hop, a step or a latency is that of one small message that waits for the one before it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tree_attention.exchange.transport.topology import Topology
from tree_attention.planning.machines import MACHINES

from .fabric import EVERYBODY, Level, SimulatedNetwork

_US, _GB = 1e-6, 1e9


@dataclass(frozen=True)
class SimulatedCluster:
    """Ranks on nodes, their networks and what their processors can do."""

    name: str
    source: str
    ranks_per_node: int
    # What the library may choose from, by itself, for a message's size.
    networks: tuple[SimulatedNetwork, ...]
    exchange: float  # seconds per call of ours
    local_operation: float  # seconds per kernel or copy
    local_bandwidth: float  # bytes per second of merges and copies, an assumption for GPUs
    key_bandwidth: float  # bytes per second of attention

    def topology(self, world_size: int) -> Topology:
        return Topology(tuple(rank // self.ranks_per_node for rank in range(world_size)))


def _nccl(
    inside: tuple[float, float, float, float],
    between: tuple[float, float, float, float],
    bandwidths: tuple[float, float, float, float],
    ranks_per_port: int = 1,
) -> tuple[SimulatedNetwork, ...]:
    """NCCL's ring and tree by its protocols LL and Simple.

    Args:
        inside, between: microseconds per hop of (LL ring, LL tree, Simple ring, Simple tree).
        bandwidths: GB/s of (LL, Simple) inside a node and of (LL, Simple) between nodes.
        ranks_per_port: ranks of a node that share a NIC.
    """
    networks = []
    bases = (6.6, 6.8, 8.4, 8.4)
    for i, name in enumerate(("LL ring", "LL tree", "Simple ring", "Simple tree")):
        near, far = bandwidths[i // 2], bandwidths[2 + i // 2]
        levels = (
            Level(8, inside[i] * _US, near * _GB, 0.3 * _US),
            Level(EVERYBODY, between[i] * _US, far * _GB, 0.3 * _US, ranks_per_port),
        )
        base = bases[i] * _US  # messages are a kernel, too
        networks.append(SimulatedNetwork(name, levels, call=base, round=base, tree="tree" in name))
    return tuple(networks)


def _gloo(*levels: Level) -> tuple[SimulatedNetwork, ...]:
    # One thread, two chunks per step; a call's cost is that of torch's and Gloo's queues.
    gloo = SimulatedNetwork(
        "gloo", levels, 60 * _US, asks_first=True, chunks=2, gathers_directly=True
    )
    return (gloo,)


_MESSAGE = 15 * _US  # of a processor, per message over Gloo's TCP


def _hosts(name: str, source: str, *levels: Level, ranks_per_node: int = 1) -> SimulatedCluster:
    return SimulatedCluster(
        name, source, ranks_per_node, _gloo(*levels), 50 * _US, 5 * _US, 5 * _GB, 10 * _GB
    )


_NCCL_SOURCE = "NCCL 2.30.7 tuning.cc (base and hop of LL and Simple, LL's caps of bandwidth)"
_LAN = Level(EVERYBODY, 1e-4, 1.25 * _GB, _MESSAGE)
_METRO = Level(EVERYBODY, 1e-3, 0.125 * _GB, _MESSAGE)

CLUSTERS = {
    cluster.name: cluster
    for cluster in (
        SimulatedCluster(
            "dgx_h100",
            f"nodes of 8 H100 (NVLink 4, a NDR 400 NIC per GPU): {_NCCL_SOURCE}, nccl-tests 290; "
            "3.35 TB/s of device memory (data sheet)",
            8,
            _nccl((0.6, 0.6, 3.4, 4.0), (3.7, 5.0, 15.0, 14.0), (141, 360, 20.4, 46)),
            exchange=5 * _US,
            local_operation=3 * _US,
            local_bandwidth=2000 * _GB,
            key_bandwidth=MACHINES["h100"].memory_bandwidth,
        ),
        SimulatedCluster(
            "pcie_4090",
            f"nodes of 8 RTX 4090 on PCIe 4 x16, one NDR 400 NIC per node: {_NCCL_SOURCE}; 24 GB/s "
            "per slot and one NIC are assumptions; 1.0 TB/s of device memory (data sheet)",
            8,
            _nccl((1.0, 1.0, 5.7, 4.0), (3.7, 5.0, 15.0, 14.0), (12, 24, 20.4, 46), 8),
            exchange=5 * _US,
            local_operation=3 * _US,
            local_bandwidth=700 * _GB,
            key_bandwidth=MACHINES["rtx4090"].memory_bandwidth,
        ),
        _hosts("lan", "0.1 ms and 10 Gb/s between hosts by definition; Gloo measured", _LAN),
        _hosts("metro", "1 ms and 1 Gb/s between hosts by definition; Gloo measured", _METRO),
        _hosts(
            "two-level",
            "lan in nodes of 4 ranks, metro between nodes, for every rank; Gloo measured",
            replace(_LAN, ranks=4),
            _METRO,
            ranks_per_node=4,
        ),
        _hosts(
            "three-level",
            "4 ranks on a host (loopback, 45 us and 1 GB/s), 8 hosts on a 10 Gb/s LAN whose NIC "
            "they share, sites of 32 ranks on one 1 Gb/s metro link each; Gloo measured",
            Level(4, 45 * _US, 1.0 * _GB, _MESSAGE),
            Level(32, 1e-4, 1.25 * _GB, _MESSAGE, ranks_per_port=4),
            Level(EVERYBODY, 1e-3, 0.125 * _GB, _MESSAGE, ranks_per_port=32),
            ranks_per_node=4,
        ),
    )
}


def _fitted(
    name: str,
    gb_per_second: float,
    machine: str,
    *,
    collective: float = 0.0,
    hop: float = 0.0,
) -> SimulatedCluster:
    """One network without latency; a call takes `collective` seconds more, a ring's hop `hop`."""
    network = SimulatedNetwork(
        "fitted", (Level(EVERYBODY, 0.0, gb_per_second * _GB),), call=collective, round=hop
    )
    source = "fitted to the paper's ring - tree; device memory by the data sheet"
    key_bandwidth = MACHINES[machine].memory_bandwidth
    return SimulatedCluster(
        f"fitted_{name}", source, 8, (network,), 0.0, 0.0, key_bandwidth, key_bandwidth
    )


# For the tables of the Tree Attention paper alone (papers/tree.py, where they are fitted).
OF_PAPER = {
    cluster.name: cluster
    for cluster in (
        SimulatedCluster(
            "mi300x",
            "nodes of 8 MI300X: 64 GB/s of Infinity Fabric to each other one and 5.3 TB/s of "
            "device memory (data sheet); hops as NVLink's are an assumption",
            8,
            _nccl((0.6, 0.6, 3.4, 4.0), (3.7, 5.0, 15.0, 14.0), (32, 64, 20.4, 46)),
            exchange=5 * _US,
            local_operation=3 * _US,
            local_bandwidth=2000 * _GB,
            key_bandwidth=MACHINES["mi300x"].memory_bandwidth,
        ),
        # The tree has two collectives more than the ring, which begins with one.
        _fitted("4090", 4.63, "rtx4090", collective=0.549e-3 / 2),
        # Three hops, and seven.
        _fitted("mi300x", 50.9, "mi300x", hop=0.144e-3 / 3),
        _fitted("h100", 346.0, "h100", hop=6.21e-3 / 7),
    )
}
