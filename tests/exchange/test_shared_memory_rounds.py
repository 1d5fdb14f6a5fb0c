# SPDX-License-Identifier: BSD-3-Clause
"""Rounds of messages in shared memory, without a communicator."""

from __future__ import annotations

import multiprocessing
import os
import statistics
import threading
import time
from typing import Any

import pytest
import torch

from distributed import AMPLE_SECONDS
from faults import (
    AMPLE,
)
from test_shared_memory import CHANNEL
from tree_attention._loader import load
from tree_attention.exchange.transport.messages import DirectTransport


def connected(count: int = 2) -> tuple[int, list[Any]]:
    """A file for `count` ranks of this process, and the memory of each."""
    made = load().SharedMemory
    file = os.memfd_create("tree_attention")
    os.ftruncate(file, made.num_bytes(count))
    members = [(10 + member, -1) for member in range(count)]
    return file, [made(file, own, members) for own in range(count)]


def wait_when_the_interpreter_ends() -> None:
    _, (first, _) = connected()
    x = torch.zeros(1, dtype=torch.uint8)
    wait = DirectTransport(first, {0: 0, 1: 1}).round({1: x}, {}).start
    threading.Thread(target=wait, args=[time.monotonic() + AMPLE], daemon=True).start()
    time.sleep(0.1)


@pytest.mark.deep
def test_interpreter_may_end_while_another_thread_waits() -> None:
    process = multiprocessing.get_context("spawn").Process(target=wait_when_the_interpreter_ends)
    process.start()
    process.join(AMPLE_SECONDS)
    assert process.exitcode == 0


def test_message_of_another_length_is_refused() -> None:
    _, (first, second) = connected()
    x = torch.zeros(100, dtype=torch.uint8)
    first.round([], [(1, x.data_ptr(), 100)]).run(1.0, True)
    with pytest.raises(RuntimeError, match="from rank 10: it has 100 bytes instead of 50"):
        second.round([(0, x.data_ptr(), 50)], []).run(1.0, True)


def test_small_messages_stay_in_few_pages() -> None:
    file, (first, second) = connected()
    x = torch.zeros(4096, dtype=torch.uint8)
    for _ in range(100):
        first.round([], [(1, x.data_ptr(), x.nbytes)]).run(1.0, True)
        second.round([(0, x.data_ptr(), x.nbytes)], []).run(1.0, True)
    assert os.fstat(file).st_blocks * 512 <= 4 * os.sysconf("SC_PAGESIZE")


def test_waits_end_at_the_deadline_and_when_closed() -> None:
    _, (first, second) = connected()
    x = torch.zeros(2 * CHANNEL, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match=r"^message to rank 11: timed out$"):
        first.round([], [(1, x.data_ptr(), x.nbytes)]).run(0.05, True)
    _, (first, second) = connected()
    receive = second.round([(0, x.data_ptr(), 1)], [])
    first.close()
    with pytest.raises(RuntimeError, match=r"^rank 10 has closed the connection$"):
        receive.run(AMPLE, True)


@pytest.mark.deep
def test_long_waits_leave_the_cores_to_others() -> None:
    x = torch.zeros(1, dtype=torch.uint8)
    used = []
    for _ in range(3):
        _, (first, _) = connected()
        begin = time.thread_time()
        with pytest.raises(RuntimeError, match="timed out"):
            first.round([(1, x.data_ptr(), 1)], []).run(1.0, True)
        used.append(time.thread_time() - begin)
    assert min(used) < 0.1  # of a second; a thread that polls needs all that it gets


def test_waits_of_milliseconds_leave_the_processor_time_to_a_quota() -> None:
    x = torch.zeros(1, dtype=torch.uint8)
    used = []
    for _ in range(20):
        _, (first, _) = connected()
        receive = first.round([(1, x.data_ptr(), 1)], [])
        begin = time.thread_time()
        with pytest.raises(RuntimeError, match="timed out"):
            receive.run(0.004, True)
        used.append(time.thread_time() - begin)
    # Some also pay for what other work takes from the caches.
    assert statistics.median(used) < 0.5 * 0.004


def test_memory_of_another_size_and_wrong_members_are_refused() -> None:
    file, (first, _) = connected()
    with pytest.raises(RuntimeError, match="has not the size for 3 ranks"):
        load().SharedMemory(file, 0, [(0, -1)] * 3)
    for member in (0, 2, -1):
        with pytest.raises(ValueError, match=f"another member of the shared memory, got {member}"):
            first.round([(member, 0, 0)], [])
