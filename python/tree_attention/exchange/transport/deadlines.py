# SPDX-License-Identifier: BSD-3-Clause
"""Calls of libraries that end in time."""

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from ..notes import ExchangeError

T = TypeVar("T")
# How long a wait for the store may go on after it was interrupted.
_INTERRUPT_SECONDS = 0.05


def remaining(deadline: float) -> timedelta:
    """The time to a `time.monotonic` deadline, at least a millisecond: zero means no timeout."""
    return timedelta(milliseconds=max(1, int(1e3 * (deadline - time.monotonic()))))


def call_before(
    deadline: float,
    call: Callable[[], T],
    interrupted: threading.Event | None = None,
    who: str = "the store of the process group",
) -> T:
    """The result of `call()` in a thread of its own, before the deadline.

    A store whose server has stalled answers no client and keeps no timeout (TCPStore blocks even in
    cancelling a wait). The thread ends with the server.
    """
    outcome: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            outcome.append(call())
        except BaseException as error:  # raised again below, in the thread of the caller
            errors.append(error)

    thread = threading.Thread(target=run, name="tree_attention.store", daemon=True)
    thread.start()
    # A wait that ends at the deadline has its answer a little later.
    deadline += 0.2
    while thread.is_alive() and (left := deadline - time.monotonic()) > 0:
        if interrupted is not None and interrupted.is_set():
            raise ExchangeError("interrupted while it waited for the other ranks")
        thread.join(min(left, _INTERRUPT_SECONDS))
    if errors:
        raise errors[0]
    if not outcome:
        raise ExchangeError(f"{who} does not answer")
    return outcome[0]


def is_watched() -> bool:
    """True where torch compares the ranks' collectives (TORCH_DISTRIBUTED_DEBUG=DETAIL).

    It counts the messages of each rank with them, and would refuse the next collective where ranks
    have sent different numbers.
    """
    return dist.get_debug_level() == dist.DebugLevel.DETAIL
