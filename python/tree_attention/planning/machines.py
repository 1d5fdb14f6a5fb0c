# SPDX-License-Identifier: BSD-3-Clause
"""Machines and links: constants of data sheets and what is assumed beside them."""

from __future__ import annotations

from dataclasses import dataclass

from ..exchange import CostTable


@dataclass(frozen=True)
class Machine:
    """What one rank runs on."""

    memory_bandwidth: float  # bytes per second
    arithmetic: float  # bf16 operations per second, sustained
    memory: float  # bytes
    source: str
    link: str  # between those of one node, or between hosts of one rank


@dataclass(frozen=True)
class Link:
    """What is between any two ranks."""

    bandwidth: float  # bytes per second, that a rank sends
    round_seconds: float  # of a small message to every other rank, with what the software takes
    source: str


@dataclass(frozen=True)
class Hosts:
    """Equal machines of one rank each, and the link between them."""

    machine: Machine
    link: Link


_HALF = "half of the data sheet's dense bf16 arithmetic is an assumption"
MACHINES = {
    "h100": Machine(3.35e12, 500e12, 80e9, f"H100 SXM, data sheet; {_HALF}", "nvlink"),
    "h200": Machine(4.8e12, 500e12, 141e9, f"H200 SXM, data sheet; {_HALF}", "nvlink"),
    "a100": Machine(2.04e12, 156e12, 80e9, f"A100 SXM 80 GB, data sheet; {_HALF}", "nvlink3"),
    "mi300x": Machine(5.3e12, 650e12, 192e9, f"MI300X, data sheet; {_HALF}", "infinity-fabric"),
    "cpu": Machine(
        *(300e9, 20e12, 512e9),
        "socket with 8 channels of DDR5-4800 (307 GB/s, data sheet) and AMX; 20 TFLOP/s of bf16 "
        "and 512 GB of memory are assumptions",
        "10gbe",
    ),
}
NODE = 8  # GPUs that have the fast link
_NCCL = "12 us for a collective of NCCL are an assumption"
LINKS = {
    "1gbe": Link(0.125e9, 300e-6, "1 Gb/s Ethernet; a round over Gloo takes 0.3 ms"),
    "10gbe": Link(1.25e9, 150e-6, "10 Gb/s Ethernet; a round over Gloo takes 0.15 ms"),
    "100gbe": Link(12.5e9, 50e-6, "100 Gb/s Ethernet; 50 us for a round are an assumption"),
    "infiniband": Link(50e9, 25e-6, "NDR 400, a port a GPU; 25 us for a round are an assumption"),
    "nvlink3": Link(300e9, 12e-6, f"NVLink 3, 300 GB/s each way, data sheet; {_NCCL}"),
    "nvlink": Link(450e9, 12e-6, f"NVLink 4, 450 GB/s each way, data sheet; {_NCCL}"),
    "infinity-fabric": Link(448e9, 12e-6, f"7 links of 64 GB/s each way, data sheet; {_NCCL}"),
}


def link_of(machine: Machine, ranks: int) -> str:
    """The name of the link that so many ranks have between them unless they say otherwise."""
    return "infiniband" if ranks > NODE and machine.link != "10gbe" else machine.link


def fitted_link(costs: CostTable, name: str) -> Link:
    """The link for which a round and the bytes of an all_gather take what `calibrate` measured.

    Raises:
        ValueError: the table has no two ranks, or no two sizes of that strategy.
    """
    seconds = {e.num_bytes: e.seconds for e in costs.exchanges if e.strategy == "all_gather"}
    others = len(costs.nodes) - 1
    if others < 1 or len(seconds) < 2:
        raise ValueError(
            f"{name} must have two ranks and two sizes of the strategy all_gather or more, got "
            f"{len(costs.nodes)} and {len(seconds)}; write a new one with "
            "`python -m tree_attention calibrate`"
        )
    least, most = min(seconds), max(seconds)
    # Where noise has made the larger one no slower, as if the bytes were all that it takes.
    each = max(seconds[most] - seconds[least], 1e-3 * seconds[most]) / (most - least)
    a_round = max(0.0, seconds[least] - each * least)
    return Link(
        others / each,
        a_round,
        f"fitted to {name}, measured over {costs.backend} on {len(costs.nodes)} ranks",
    )
