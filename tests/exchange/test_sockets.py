# SPDX-License-Identifier: BSD-3-Clause
"""Messages through connections between ranks that share no memory, and when they take the group."""

from __future__ import annotations

import io
import os
import socket
import threading
import time
from contextlib import redirect_stdout
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from distributed import on_ranks, run_ranks, through_the_group
from faults import AMPLE, QUICK, call
from helpers import assert_same_bits
from test_shared_memory import results_of
from tiers import tiers
from tree_attention.exchange import Communicator
from tree_attention.exchange.transport.direct import sockets
from tree_attention.exchange.transport.messages import DirectTransport

LARGE = 3 << 20  # in bytes more than a connection takes at once


def compare_ways(rank: int, world_size: int, nodes: str) -> None:
    through_group, connected = Communicator(nodes=nodes), Communicator(nodes=nodes)
    sizes = (0, 1, 1000, LARGE // 4)
    with through_the_group():
        expected = results_of(through_group, sizes)
    for one, other in zip(results_of(connected, sizes), expected, strict=True):
        assert_same_bits((one,), (other,))
    assert connected.bytes_sent == through_group.bytes_sent
    assert connected.link.num_operations == through_group.link.num_operations
    ways = connected.link.sockets
    assert isinstance(ways, DirectTransport)
    assert [r for r in range(world_size) if r in ways] == [
        r for r in range(world_size) if nodes[r] != nodes[rank]
    ]


@pytest.mark.parametrize("nodes", tiers(["aab"], ["ab", "abc", "aabb", "abab", "abcde"]))
def test_same_bits_and_bytes_as_through_the_group(nodes: str) -> None:
    run_ranks(compare_ways, len(nodes), nodes)


@on_ranks(3)
def test_connected_ranks_send_nothing_through_the_group(rank: int, world_size: int) -> None:
    comm = Communicator(nodes="abc")
    call("all_gather", comm)
    with mock.patch.object(dist.ProcessGroup, "send", side_effect=AssertionError("a message")):
        call("all_gather", comm)
        call("ring of queries", comm)
        comm.all_reduce(torch.ones(LARGE))


def connect_in_spite_of(rank: int, world_size: int, obstacle: str) -> tuple[object, str]:
    def on_rank_1(function: Any, other: Any) -> Any:
        return other if rank == 1 else function

    refused = mock.Mock(side_effect=ConnectionRefusedError(111, "Connection refused"))
    patches = {
        "port": mock.patch.object(
            socket, "create_server", on_rank_1(socket.create_server, refused)
        ),
        "way": mock.patch.object(
            socket, "create_connection", on_rank_1(socket.create_connection, refused)
        ),
        "interface": mock.patch.dict(
            os.environ, {"GLOO_SOCKET_IFNAME": "nosuch0"} if rank == 1 else {}
        ),
        "debug": mock.patch.object(sockets, "is_watched", lambda: rank == 1),
    }
    comm, printed = Communicator(nodes="abc"), io.StringIO()
    in_short = mock.patch.object(sockets, "_CONNECT_SECONDS", 0.5)
    with patches[obstacle], in_short, redirect_stdout(printed):
        with through_the_group():
            expected = call("all_gather", Communicator(nodes="abc"))
        assert_same_bits(call("all_gather", comm, explain=True), expected)
    return comm.link.sockets, printed.getvalue()


def test_a_stranger_has_a_second_in_all() -> None:
    ours, theirs = socket.socketpair()
    ended = threading.Event()

    def drip() -> None:
        while not ended.wait(0.5):
            theirs.send(b"x")

    thread = threading.Thread(target=drip)
    with ours, theirs:
        thread.start()
        try:
            begin = time.monotonic()
            assert sockets._name_of(ours, bytes(16), begin + 1.0) == -1
            assert 0.9 < time.monotonic() - begin < 5.0  # twenty bytes take ten seconds
        finally:
            ended.set()
            thread.join()


@pytest.mark.deep
@on_ranks(3)
def test_strangers_in_front_of_a_rank_do_not_hold_it(rank: int, world_size: int) -> None:
    """Those that wait to be accepted when the time has ended are not accepted."""
    listen, strangers = sockets._listen, []

    def listen_to_strangers(listeners: Any, opened: Any) -> Any:
        note = listen(listeners, opened)
        for _ in range(40 if rank == 0 else 0):
            strangers.append(socket.create_connection((note["address"], note["port"])))
        return note

    comm = Communicator(nodes="abc", timeout=AMPLE)
    begin = time.monotonic()
    with (
        mock.patch.object(sockets, "_listen", listen_to_strangers),
        mock.patch.object(sockets, "_CONNECT_SECONDS", 2.0),
    ):
        call("all_gather", comm)
    assert time.monotonic() - begin < QUICK
    assert comm.link.sockets == "rank 0: no connection from rank 1"
    for stranger in strangers:
        stranger.close()


@pytest.mark.parametrize(
    "obstacle, reason",
    [
        ("port", "rank 1: [Errno 111] Connection refused"),
        ("way", "rank 0: no connection from rank 1"),
        ("interface", "rank 1: [Errno 19] No such device"),
        ("debug", "rank 1: TORCH_DISTRIBUTED_DEBUG=DETAIL watches the messages of the group"),
    ],
)
def test_ranks_that_cannot_connect_use_the_group(obstacle: str, reason: str) -> None:
    found = run_ranks(connect_in_spite_of, 3, obstacle)
    assert [ways for ways, _ in found] == [reason] * 3
    assert found[0][1].strip().endswith(f"; no connections of its own: {reason}")


def connect_beside_strangers(rank: int, world_size: int) -> None:
    strangers: list[socket.socket] = []

    def listen(*arguments: Any) -> Any:
        note = originally(*arguments)
        place = note["address"], note["port"]
        for hello in (b"", b"GET / HTTP/1.1\r\n\r\n\r\n\r\n", bytes(20)):
            strangers.append(socket.create_connection(place))
            strangers[-1].sendall(hello)
        return note

    originally = sockets._listen
    comm = Communicator(nodes="abc")
    with (
        mock.patch.object(sockets, "_listen", listen),
        mock.patch.object(sockets, "_HELLO_SECONDS", 0.5),
    ):
        result = call("all_gather", comm)
    assert isinstance(comm.link.sockets, DirectTransport)
    assert len(strangers) == 3
    with through_the_group():
        assert_same_bits(result, call("all_gather", Communicator(nodes="abc")))
    for stranger in strangers:
        stranger.close()


def test_strangers_are_left_out() -> None:
    run_ranks(connect_beside_strangers, 3)


def test_address_of_the_interface_that_gloo_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,eth0")
    assert sockets._own_address() == "127.0.0.1"
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert sockets._own_address() == "127.0.0.1"
