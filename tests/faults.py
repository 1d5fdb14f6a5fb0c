# SPDX-License-Identifier: BSD-3-Clause
"""Calls that must fail, in time and for good, and the operations at which a rank can be lost."""

from __future__ import annotations

import gc
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tree_attention import (
    ExchangeError,
    ring_decode,
    ring_pass_q_decode,
    strategies,
    tree_decode,
)
from tree_attention.exchange import Communicator, Link
from tree_attention.exchange.transport.messages import Messages

TIMEOUT = 0.5
SLACK = 8.0  # above any delay of a machine with other work; TIMEOUT + SLACK is below AMPLE
AMPLE = 20.0  # for what must succeed, or fail long before
QUICK = 10.0
# In place of TIMEOUT where worlds run at the same time and what precedes the loss must succeed.
STOPPED = 2.0
KINDS = (*strategies(), "ring", "ring of queries")
ROUND = 2  # operations of a round of messages: its start and its end

WAITED_FOR = r"(all_gather|all_to_all|all_reduce) of \d|messages: |shift"

Outcome = tuple[float, str]


def end_or_stall(how: str) -> None:
    """This rank ends ("kill") or answers no more ("stop")."""
    os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[how])


def call(
    kind: str,
    comm: Communicator,
    seqlen_q: int = 1,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """A strategy or a ring, on a shard that depends on the rank."""
    torch.manual_seed(comm.rank)
    q = torch.ones(2, 4, seqlen_q, 32, dtype=dtype, device=device)
    k, v = torch.randn(2, 2, 2, 10, 32).to(device, dtype)
    if kind == "ring":
        return ring_decode(q, k, v, group=comm, **options)
    if kind == "ring of queries":
        return ring_pass_q_decode(q, k, v, group=comm, **options)
    return tree_decode(q, k, v, group=comm, strategy=kind, **options)


def failure(function: Callable[..., object], *args: Any, **options: Any) -> Outcome:
    """Seconds until the call raised ExchangeError, and its message."""
    begin = time.monotonic()
    try:
        result = function(*args, **options)
    except ExchangeError as error:
        return time.monotonic() - begin, str(error)
    raise AssertionError(f"no ExchangeError but {result}")


def assert_refuses_further_use(comm: Communicator) -> None:
    sent = comm.bytes_sent
    seconds, message = failure(call, "all_gather", comm, timeout=AMPLE)
    assert seconds < QUICK and "has failed before" in message
    assert comm.failed is not None and comm.bytes_sent == sent


def right_or_failed(kind: str, comm: Communicator, expected: tuple[Tensor, Tensor]) -> Outcome:
    """A survivor to whom the lost rank had sent its part may have a result, which is right; then
    its next call fails."""
    begin = time.monotonic()
    try:
        result = call(kind, comm)
    except ExchangeError:
        pass
    else:
        assert torch.equal(result[0], expected[0]) and torch.equal(result[1], expected[1])
        failure(call, kind, comm)
    seconds = time.monotonic() - begin
    assert_refuses_further_use(comm)
    assert re.search(WAITED_FOR, str(comm.failed)), comm.failed
    return seconds, str(comm.failed)


@contextmanager
def before_operation(reached: Callable[[int], None]) -> Iterator[None]:
    """Calls `reached(i)` before operation i of an exchange or a ring, on any link."""
    owners = {
        Link: ("all_gather", "all_to_all", "all_reduce", "start_shift", "finish"),
        Messages: ("start", "finish"),
    }
    originals = {(o, name): getattr(o, name) for o, names in owners.items() for name in names}
    count = 0

    def wrapped(original: Callable[..., Any]) -> Callable[..., Any]:
        def operation(*args: Any, **options: Any) -> Any:
            nonlocal count
            reached(count)
            count += 1
            return original(*args, **options)

        return operation

    for (owner, name), original in originals.items():
        setattr(owner, name, wrapped(original))
    try:
        yield
    finally:
        for (owner, name), original in originals.items():
            setattr(owner, name, original)


class Once:
    """For `before_operation`: acts before one operation, the first time."""

    def __init__(self, number: int, act: Callable[[], object]) -> None:
        self._number, self._act = number, act
        self.done = False

    def __call__(self, number: int) -> None:
        if number == self._number and not self.done:
            self.done = True
            self._act()


def count_operations(kind: str, comm: Communicator) -> int:
    """Number of operations of a call in steady state."""
    numbers = [-1]
    with before_operation(numbers.append):
        call(kind, comm, timeout=AMPLE)
    return numbers[-1] + 1


def phases(num_operations: int) -> list[int]:
    """Before the first operation, between two, and after the last: before the next call's first."""
    return sorted({0, min(1, num_operations), num_operations // 2, num_operations})


def assert_nothing_left(before: set[str]) -> None:
    """No thread and no file descriptor, a moment after a group was destroyed."""
    gc.collect()
    deadline = time.monotonic() + QUICK
    while left := resources() - before:
        assert time.monotonic() < deadline, left
        time.sleep(0.02)


def resources() -> set[str]:
    """Threads, and what file descriptors stand for, sockets among it."""
    threads = {f"thread {name}" for name in os.listdir("/proc/self/task")}
    files = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            files.add(os.readlink(f"/proc/self/fd/{name}"))
        except FileNotFoundError:
            continue  # the one that listed them
    return threads | files
