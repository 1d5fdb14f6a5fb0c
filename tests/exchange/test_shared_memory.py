# SPDX-License-Identifier: BSD-3-Clause
"""Messages through memory that the ranks of a node share, and when they take the group instead."""

from __future__ import annotations

import gc
import io
import os
import signal
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, redirect_stdout
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from distributed import Lost, on_ranks, run_ranks
from faults import (
    AMPLE,
    QUICK,
    SLACK,
    TIMEOUT,
    Once,
    assert_refuses_further_use,
    before_operation,
    call,
    end_or_stall,
    failure,
)
from helpers import assert_same_bits
from tiers import by_world, tiers
from tree_attention import strategies
from tree_attention._loader import load
from tree_attention.exchange import Communicator
from tree_attention.exchange.transport.direct import shared_memory
from tree_attention.exchange.transport.messages import DirectTransport

CHANNEL = 256 << 10  # kChannelBytes of csrc/cpu/shared_memory.h


def results_of(comm: Communicator, sizes: Sequence[int]) -> list[torch.Tensor]:
    """Of every kind of call, in sizes that fit into a channel, just do not, and are far larger."""
    torch.manual_seed(comm.rank)
    found: list[torch.Tensor] = []
    for kind in (*strategies(), "ring of queries"):
        found += call(kind, comm)
    for size in sizes:
        found.append(comm.all_reduce(torch.randn(size)))
        counts = [size + rank for rank in range(comm.world_size)]
        found.append(comm.all_gather(torch.randn(counts[comm.rank]), counts))
    return found


def compare_ways(rank: int, world_size: int, nodes: str) -> None:
    far, near = Communicator(nodes=nodes), Communicator(nodes=nodes)
    sizes = (0, 1, 1000, CHANNEL // 4 - 2, CHANNEL // 4, 3 * CHANNEL + 5)
    with mock.patch.object(shared_memory, "connect", return_value="not now"):
        expected = results_of(far, sizes)
    for one, other in zip(results_of(near, sizes), expected, strict=True):
        assert_same_bits((one,), (other,))
    assert near.bytes_sent == far.bytes_sent and near.link.num_operations == far.link.num_operations
    assert far.link.shared_memory == "not now"
    memory = near.link.shared_memory
    assert isinstance(memory, DirectTransport)
    assert [r for r in range(world_size) if r in memory] == [
        r for r in range(world_size) if nodes[r] == nodes[rank]
    ]


@pytest.mark.parametrize("nodes", tiers(["aab"], ["aa", "abab", "aaa", "abbb", "aabb", "aaaaa"]))
def test_same_bits_and_bytes_as_through_the_group(nodes: str) -> None:
    run_ranks(compare_ways, len(nodes), nodes)


@on_ranks(3)
def test_ranks_of_a_node_need_no_network(rank: int, world_size: int) -> None:
    comm = Communicator()
    call("all_gather", comm)
    with mock.patch.object(dist.ProcessGroup, "send", side_effect=AssertionError("a message")):
        call("all_gather", comm)
        comm.all_reduce(torch.ones(3 * CHANNEL))


def explain_every_strategy(rank: int, world_size: int) -> dict[str, str]:
    comm = Communicator()
    found = {}
    for strategy in strategies():
        printed = io.StringIO()
        with redirect_stdout(printed):
            call(strategy, comm, explain=True)
        found[strategy] = printed.getvalue()
    return found


def test_explanations_name_shared_memory_where_it_is_used() -> None:
    found, _ = run_ranks(explain_every_strategy, 2)
    through_group = [name for name, text in found.items() if "shared memory" not in text]
    assert sorted(through_group) == ["three_allreduce"]


def try_in_vain(rank: int, world_size: int, obstacle: str) -> str:
    def of_rank_1(function: Any, other: Any) -> Any:
        return other if rank == 1 else function

    patches = {
        "host": mock.patch.object(socket, "gethostname", lambda: f"host {rank}"),
        "descriptors": mock.patch.object(
            os, "memfd_create", side_effect=OSError(24, "Too many open files")
        ),
        "processes": mock.patch.object(
            os, "pidfd_open", of_rank_1(os.pidfd_open, mock.Mock(side_effect=OSError(1, "Denied")))
        ),
        "no Linux": mock.patch.object(
            shared_memory.os, "memfd_create", mock.Mock(side_effect=AttributeError("memfd_create"))
        ),
        "key": mock.patch.object(os, "pread", of_rank_1(os.pread, lambda *_: b"another")),
        "debug": mock.patch.object(shared_memory, "is_watched", lambda: rank == 1),
    }
    comm = Communicator(nodes="a" * world_size)
    with patches[obstacle]:
        expected = call("all_gather", Communicator(nodes=range(world_size)))
        assert_same_bits(call("all_gather", comm), expected)
        comm.all_reduce(torch.ones(5))
    assert isinstance(comm.link.shared_memory, str)
    return comm.link.shared_memory


@pytest.mark.parametrize(
    "obstacle,reason",
    [
        ("host", "rank 0: ranks of a node are on 3 hosts"),
        ("descriptors", "rank 0: [Errno 24] Too many open files"),
        ("processes", "rank 1: [Errno 1] Denied"),
        ("no Linux", "rank 0: memfd_create"),
        ("key", "rank 1: what the first rank of the node has made is not seen here"),
        ("debug", "rank 1: TORCH_DISTRIBUTED_DEBUG=DETAIL watches the messages of"),
    ],
)
def test_ranks_that_cannot_share_use_the_group(obstacle: str, reason: str) -> None:
    for found in run_ranks(try_in_vain, 3, obstacle):
        assert found.startswith(reason), found


@pytest.mark.parametrize("kind", ["file", "pipe"])
def test_files_of_strangers_are_not_opened_for_writing(tmp_path: Path, kind: str) -> None:
    """Another host's process of the same number may have any file behind the descriptor."""
    with ExitStack() as files:
        if kind == "file":
            (tmp_path / "file").write_text("a line of a log of somebody else")
            descriptor = os.open(tmp_path / "file", os.O_RDONLY)
        else:
            descriptor, other = os.pipe()
            files.callback(os.close, other)
        files.callback(os.close, descriptor)
        maker = {"host": "a", "process": os.getpid(), "file": descriptor, "key": "00" * 16}
        modes: list[int] = []

        def opened(path: str, mode: int, original: Any = os.open) -> int:
            modes.append(mode & os.O_ACCMODE)
            return original(path, mode)

        with (
            mock.patch.object(os, "open", opened),
            pytest.raises(RuntimeError, match="what the first rank of the node has made is not"),
        ):
            shared_memory._open(1, {0: maker, 1: maker}, files, [])
        assert modes == [os.O_RDONLY]


def lose_neighbour(rank: int, world_size: int, how: str) -> tuple[float, str]:
    timeout = TIMEOUT if how == "stop" else AMPLE
    comm = Communicator(timeout=timeout)
    call("all_gather", comm, timeout=AMPLE)
    dist.barrier()
    if rank == 1:
        end_or_stall(how)
    outcome = failure(call, "all_gather", comm)
    assert_refuses_further_use(comm)
    return outcome


@by_world([2], [3, 4])
def test_killed_neighbour_is_noticed_at_once(world_size: int) -> None:
    for outcome in run_ranks(lose_neighbour, world_size, "kill", lost=[1]):
        if not isinstance(outcome, Lost):
            seconds, message = outcome
            # One rank notices, and tells those that wait for others.
            assert seconds < QUICK, message
            assert "process of rank 1 has ended" in message or "closed the connection" in message


@by_world([2], [3])
def test_stopped_neighbour_is_lost_at_the_deadline(world_size: int) -> None:
    for outcome in run_ranks(lose_neighbour, world_size, "stop", lost=[1]):
        if not isinstance(outcome, Lost):
            assert outcome[0] < TIMEOUT + SLACK and "no answer within 0.5 s" in outcome[1]


@pytest.mark.parametrize("how", tiers(["kill"], ["stop"]))
@on_ranks(2, lost=[1])
def test_no_rank_goes_on_without_another(rank: int, world_size: int, how: str) -> None:
    comm = Communicator(timeout=TIMEOUT if how == "stop" else AMPLE)
    x = torch.ones(100, dtype=torch.uint8)
    receive, send = ({0: x}, {}) if rank == 1 else ({}, {1: x})

    def move(deadline: float) -> None:
        comm.link.messages(receive, send, x.device, has_call_id=False).run(deadline)

    def pass_on(timeout: float | None = None) -> None:
        with comm.begin("passed on", timeout) as passed_on:
            passed_on.run((), move)

    call("all_gather", comm, timeout=AMPLE)
    pass_on(AMPLE)
    dist.barrier()
    if rank == 1:
        end_or_stall(how)
    pass_on()  # which the lost rank might still come for
    seconds, message = failure(pass_on)
    assert seconds < QUICK and "message to rank 1: " in message


@on_ranks(3, lost=[0])
def test_messages_outlive_their_sender(rank: int, world_size: int) -> None:
    """Rank 0 has all it needs and ends; rank 2 is slow, and what rank 0 left for it counts."""
    comm = Communicator(timeout=AMPLE)
    expected = call("all_gather", comm)
    if rank == 2:
        time.sleep(0.3)
    assert_same_bits(call("all_gather", comm), expected)
    if rank == 0:
        os._exit(0)


@on_ranks(2, fresh=True)
def test_a_wait_ends_with_control_c(rank: int, world_size: int) -> None:
    comm = Communicator(timeout=AMPLE)
    call("all_gather", comm)
    dist.barrier()
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:  # does not answer
        store.wait(["interrupted"], timedelta(seconds=2 * AMPLE))
        store.set("seen", "")
        return
    timer = threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGINT])
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt), before_operation(Once(0, timer.start)):
        call("all_gather", comm)
    assert time.monotonic() - begin < QUICK
    assert str(comm.failed).startswith("interrupted by KeyboardInterrupt")
    store.set("interrupted", "")
    store.wait(["seen"], timedelta(seconds=2 * AMPLE))  # before the store's process ends


def held() -> tuple[int, int]:
    """Descriptors, and mappings of shared memory."""
    gc.collect()
    with open("/proc/self/maps") as maps:
        mappings = sum("memfd:tree_attention" in line for line in maps)
    return len(os.listdir("/proc/self/fd")), mappings


@pytest.mark.deep
@on_ranks(3)
def test_memory_goes_with_its_communicator(rank: int, world_size: int) -> None:
    before = held()
    for _ in range(5):
        comm = Communicator()
        call("all_gather", comm)
        descriptors, mappings = held()
        assert descriptors == before[0] + world_size - 1 and mappings == before[1] + 1
        dist.barrier()
        del comm
    assert held() == before


@pytest.mark.deep
def test_descriptors_of_processes_belong_to_the_memory() -> None:
    made = load().SharedMemory
    before = held()
    file = os.memfd_create("tree_attention")
    os.ftruncate(file, made.num_bytes(2))
    process = os.pidfd_open(os.getpid())
    with pytest.raises(RuntimeError, match="has not the size for 3 ranks"):
        made(file, 0, [(0, -1), (1, process), (2, -1)])
    memory = made(file, 0, [(0, -1), (1, process)])
    os.close(file)
    assert held() == (before[0] + 1, before[1] + 1)
    del memory
    assert held() == before
