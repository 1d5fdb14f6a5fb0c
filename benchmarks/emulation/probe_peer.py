# SPDX-License-Identifier: BSD-3-Clause
"""The two ends of a measured connection, at which one does what the other asks for.

probe_peer.py answer | probe_peer.py ask HOST ROUND_TRIPS BYTES
"""

import json
import socket
import statistics
import sys
import time

_PORT = 29400
_TRANSFERS = 9


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
