# SPDX-License-Identifier: BSD-3-Clause
"""Machines and links by their data sheets: the one table of the planner and of the benchmarks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..exchange import CostTable


@dataclass(frozen=True)
class Machine:
    """Hardware of one rank: a GPU, or a socket."""

    name: str
    memory_bandwidth: float  # peak, bytes per second
    arithmetic: float  # peak of dense bf16, operations per second
    memory: float  # bytes
    link: str  # between ranks of one node, or between hosts of one rank
    multiprocessors: int = 0
    source: str = "data sheet"
    # The next three are known of measured machines only: no data sheet has them.
    weights_bandwidth: float | None = None  # bytes of weights per second, in products with one row
    layer_seconds: float = 0.0  # of a layer for a token, beyond reading weights and keys
    # Operations for each byte of keys that memory_bandwidth was measured with, so that it has them.
    operations_with_a_byte: float = 0.0
    bus: float = 0.0  # bytes per second to the host's memory and back; 0: it computes in there


@dataclass(frozen=True)
class Link:
    """Connection between any two ranks."""

    bandwidth: float  # bytes per second, that a rank sends
    round_seconds: float  # of a small message to every other rank, software included
    source: str


@dataclass(frozen=True)
class Hosts:
    """Equal machines of one rank each, and the link between them."""

    machine: Machine
    link: Link


BUS_SECONDS = 20e-6  # of two small copies, to the host and back: an assumption
SUSTAINED = 0.5  # share of the arithmetic's peak that matrix products reach: an assumption
_CPU = "8 channels of DDR5-4800; 40 TFLOP/s of AMX and 512 GB of memory are assumptions"
_PCIE_4, _PCIE_5 = 24e9, 48e9  # of x16, each way: 3/4 of the data sheet's, an assumption
MACHINES = {
    "a100": Machine("A100 SXM 80 GB", 2.039e12, 312e12, 80e9, "nvlink3", 108, bus=_PCIE_4),
    "h100": Machine("H100 SXM", 3.35e12, 989e12, 80e9, "nvlink", 132, bus=_PCIE_5),
    "h200": Machine("H200 SXM", 4.8e12, 989e12, 141e9, "nvlink", 132, bus=_PCIE_5),
    "mi300x": Machine("MI300X", 5.3e12, 1307e12, 192e9, "infinity-fabric", 304, bus=_PCIE_5),
    "rtx4090": Machine("RTX 4090", 1.0e12, 165e12, 24e9, "pcie4", 128, bus=_PCIE_4),
    "cpu": Machine("CPU socket", 307e9, 40e12, 512e9, "10gbe", source=_CPU),
}
HOST = MACHINES["cpu"]  # of each GPU, where keys are far
_NCCL = "12 us for a collective of NCCL are an assumption"
LINKS = {
    "1gbe": Link(0.125e9, 300e-6, "1 Gb/s Ethernet; 0.3 ms for a round are an assumption"),
    "10gbe": Link(1.25e9, 150e-6, "10 Gb/s Ethernet; 0.15 ms for a round are an assumption"),
    "100gbe": Link(12.5e9, 50e-6, "100 Gb/s Ethernet; 50 us for a round are an assumption"),
    "infiniband": Link(50e9, 25e-6, "NDR 400, a port a GPU; 25 us for a round are an assumption"),
    "pcie4": Link(_PCIE_4, 12e-6, f"PCIe 4 x16; 24 of 32 GB/s are an assumption; {_NCCL}"),
    "nvlink3": Link(300e9, 12e-6, f"NVLink 3, 300 GB/s each way, data sheet; {_NCCL}"),
    "nvlink": Link(450e9, 12e-6, f"NVLink 4, 450 GB/s each way, data sheet; {_NCCL}"),
    "infinity-fabric": Link(448e9, 12e-6, f"7 links of 64 GB/s each way, data sheet; {_NCCL}"),
}


def link_of(machine: Machine, ranks: int) -> str:
    """Return the name of the usual link; 8 GPUs of a node have the fast one."""
    return "infiniband" if ranks > 8 and machine.link != "10gbe" else machine.link


def fitted_link(costs: CostTable, name: str) -> Link:
    """Return the link on which an all_gather takes what `calibrate` measured."""
    seconds = {e.num_bytes: e.seconds for e in costs.exchanges if e.strategy == "all_gather"}
    others = len(costs.nodes) - 1
    if others < 1 or len(seconds) < 2:
        raise ValueError(
            f"{name} must have two ranks and two sizes of all_gather or more, got {others + 1} and "
            f"{len(seconds)}; write a new one with `python -m tree_attention calibrate`"
        )
    source = f"fitted to {name}, measured over {costs.backend} on {others + 1} ranks"
    return link_of_times(seconds, others, source)


def link_of_times(seconds: Mapping[int, float], others: int, source: str) -> Link:
    """Return the link on which an all_gather with so many others takes these times, by bytes."""
    least, most = min(seconds), max(seconds)
    # Where noise has made the larger one no slower, as if the bytes were all that it takes.
    each = max(seconds[most] - seconds[least], 1e-3 * seconds[most]) / (most - least)
    return Link(others / each, max(0.0, seconds[least] - each * least), source)
