# SPDX-License-Identifier: BSD-3-Clause
"""What the links of a cluster are like: round trips and bulk transfers over TCP."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .hosts import EmulatedCluster
from .network import host_name

_PROGRAM = Path(__file__).with_name("probe_peer.py")


@dataclass(frozen=True)
class Probe:
    """Samples of the path from one host to another."""

    hosts: tuple[int, int]
    expected_rtt: float
    expected_rate: float
    rtts: Sequence[float]  # seconds, of one byte there and one back
    rates: Sequence[float]  # bits per second of payload

    def __str__(self) -> str:
        rtt = [1e3 * value for value in spread(self.rtts)]
        rate = [value / 1e9 for value in spread(self.rates)]
        return (
            f"{host_name(self.hosts[0])} to {host_name(self.hosts[1])}: round trip "
            f"{rtt[1]:.3f} ms ({rtt[0]:.3f} to {rtt[2]:.3f}), link {1e3 * self.expected_rtt:g}; "
            f"bulk {rate[1]:.2f} Gb/s ({rate[0]:.2f} to {rate[2]:.2f}), "
            f"link {self.expected_rate / 1e9:g}"
        )


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """10th percentile, median, 90th percentile."""
    tenths = statistics.quantiles(values, n=10, method="inclusive")
    return tenths[0], statistics.median(values), tenths[-1]


def probe(
    cluster: EmulatedCluster, a: int, b: int, round_trips: int = 300, seconds: float = 0.2
) -> Probe:
    """`seconds`: of one bulk transfer at the link's rate."""
    link = cluster.wiring.link(a, b)
    num_bytes = int(link.rate / 8 * seconds)
    command = [sys.executable, str(_PROGRAM)]
    cluster.start(b, [*command, "answer"])
    asking = cluster.start(
        a,
        [*command, "ask", host_name(b), str(round_trips), str(num_bytes)],
        stdout=subprocess.PIPE,
        text=True,
    )
    output, _ = asking.communicate(timeout=120)
    if asking.returncode:
        raise RuntimeError(f"{host_name(a)} did not reach {host_name(b)}")
    measured: dict[str, Any] = json.loads(output)
    return Probe((a, b), 2 * link.delay, link.rate, measured["rtts"], measured["rates"])
