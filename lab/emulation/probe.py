# SPDX-License-Identifier: BSD-3-Clause
"""Round trips and bulk transfers over TCP between hosts of a cluster.

Each end runs this file: probe.py answer | probe.py ask HOST ROUND_TRIPS BYTES
"""

from __future__ import annotations

import json
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

# The ends are started by path.
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[2])

from lab.emulation.network import host_name

if TYPE_CHECKING:
    from .hosts import EmulatedCluster

_PORT = 29400
_TRANSFERS = 9


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
    command = [sys.executable, __file__]
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


def _answer() -> None:
    with socket.create_server(("", _PORT)) as server:
        connection, _ = server.accept()
    buffer = bytearray(1 << 20)
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(_receive_number(connection)):
            connection.sendall(connection.recv(1))
        for _ in range(1 + _TRANSFERS):
            left = _receive_number(connection)
            while left:
                left -= connection.recv_into(buffer, min(left, len(buffer)))
            connection.sendall(b"x")


def _receive_number(connection: socket.socket) -> int:
    return int.from_bytes(connection.recv(8, socket.MSG_WAITALL), "big")


def _ask(host: str, round_trips: int, num_bytes: int) -> dict[str, list[float]]:
    connection = _connect(host)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(round_trips.to_bytes(8, "big"))
    rtts, rates = [], []
    for _ in range(round_trips):
        begin = time.perf_counter()
        connection.sendall(b"x")
        connection.recv(1)
        rtts.append(time.perf_counter() - begin)
    data = num_bytes.to_bytes(8, "big") + bytes(num_bytes)
    for _ in range(1 + _TRANSFERS):
        begin = time.perf_counter()
        connection.sendall(data)
        connection.recv(1)
        # The answer's way back, and the first byte's there, are no transfer.
        seconds = time.perf_counter() - begin - statistics.median(rtts)
        rates.append(8 * len(data) / seconds)
    return {"rtts": rtts[1:], "rates": rates[1:]}  # the first ones warm the connection up


def _connect(host: str) -> socket.socket:
    deadline = time.monotonic() + 20
    while True:
        try:
            return socket.create_connection((host, _PORT), timeout=60)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


if __name__ == "__main__":
    if sys.argv[1] == "answer":
        _answer()
    else:
        print(json.dumps(_ask(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))))
