# SPDX-License-Identifier: BSD-3-Clause
"""Connections between ranks that share no memory, for messages that the caller itself moves.

Gloo's threads move its messages, and a sender asks its receiver first. Here a message begins to go
out at `start`.
"""

import hmac
import os
import secrets
import socket
import struct
import time
from collections.abc import Sequence
from contextlib import ExitStack

from ...._loader import load
from ...._network import address_of, address_towards
from ...notes import Gather, Note, attempt, first_reason
from ..deadlines import is_watched
from ..messages import DirectTransport

_KEY_BYTES = 16
_CONNECT_SECONDS = 10.0  # at most, and half of what the call has
_HELLO_SECONDS = 1.0  # in which somebody who connects has to say who it is


def connect(
    rank: int, others: Sequence[int], gather: Gather, deadline: float
) -> DirectTransport | str:
    """The connections of this rank to `others`, who are connected to it, or why there are none.

    Collective. Either all ranks have their connections or none.
    """
    with ExitStack() as opened:
        listeners: list[socket.socket] = []
        note = attempt(lambda: _listen(listeners, opened))
        notes = gather("sockets, made", note)
        if reason := first_reason(notes):
            return reason
        now = time.monotonic()
        end = now + min(_CONNECT_SECONDS, (deadline - now) / 2)
        found: dict[int, socket.socket] = {}

        def meet() -> Note:
            """Connects to the ranks before this one, which need not have accepted yet, then
            accepts."""
            before = [other for other in others if other < rank]
            for other in before:
                place = notes[other]["address"], notes[other]["port"]
                try:
                    connection = socket.create_connection(place, max(0.1, end - time.monotonic()))
                except OSError as error:
                    raise OSError(f"no connection to rank {other} at {place[0]}: {error}") from None
                found[other] = opened.enter_context(connection)
                connection.sendall(bytes.fromhex(notes[other]["key"]) + struct.pack("!I", rank))
            own_key = bytes.fromhex(notes[rank]["key"])
            behind = set(others) - set(before)
            while behind:
                try:
                    listeners[0].settimeout(_left(end))
                    connection, _ = listeners[0].accept()
                except TimeoutError:
                    raise OSError(f"no connection from rank {min(behind)}") from None
                opened.enter_context(connection)
                other = _name_of(connection, own_key, min(end, time.monotonic() + _HELLO_SECONDS))
                if other in behind:
                    behind.remove(other)
                    found[other] = connection
            for connection in found.values():
                connection.setblocking(False)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return {}

        if reason := first_reason(gather("sockets, connected", attempt(meet))):
            return reason
        connections = load().Sockets([(other, s.detach()) for other, s in found.items()])
        return DirectTransport(connections, {other: other for other in found})


def _listen(listeners: list[socket.socket], opened: ExitStack) -> Note:
    """Opens a port for the ranks with higher numbers."""
    if is_watched():
        raise OSError("TORCH_DISTRIBUTED_DEBUG=DETAIL watches the messages of the group")
    address = _own_address()
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, 0), family=family, backlog=1024)
    listeners.append(opened.enter_context(listener))
    key = secrets.token_bytes(_KEY_BYTES)
    return {"address": address, "port": listener.getsockname()[1], "key": key.hex()}


def _own_address() -> str:
    """The address that others reach this host by: of the network interface that Gloo is told to
    use, else the one from which messages leave to the host that all ranks know."""
    name = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    if name:
        return address_of(name)
    return address_towards(os.environ.get("MASTER_ADDR") or socket.gethostname(), 1)


def _left(end: float) -> float:
    """The seconds to `end`; TimeoutError where there are none, whatever waits already."""
    left = end - time.monotonic()
    if left <= 0.0:
        raise TimeoutError
    return left


def _name_of(connection: socket.socket, key: bytes, end: float) -> int:
    """The rank that has connected, or -1 for a stranger, who does not know the key or is slow."""
    hello = b""
    try:
        while len(hello) < _KEY_BYTES + 4:
            connection.settimeout(_left(end))
            part = connection.recv(_KEY_BYTES + 4 - len(hello))
            if not part:
                return -1
            hello += part
    except OSError:
        return -1
    if not hmac.compare_digest(hello[:_KEY_BYTES], key):
        return -1
    rank: int = struct.unpack("!I", hello[_KEY_BYTES:])[0]
    return rank
