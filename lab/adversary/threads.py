# SPDX-License-Identifier: BSD-3-Clause
"""Several threads of each rank on one communicator: each call is right or refused, never mixed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from random import Random
from typing import Any

import torch

from helpers import Problem
from tree_attention import BlockCyclic, ExchangeError, all_merge_states

from . import model
from .cases import Case
from .ops import call_decoder, decode_arguments
from .outcome import AMPLE, SLACK, Outcome, attempt
from .places import Place, leave, place

_OPS = ("tree_decode", "ring_decode", "ring_pass_q_decode", "all_merge_states")
_SECONDS = 1.5  # of a call: which thread of a rank meets which of another is chance


def world_size(case: Case) -> int:
    size = case.first.choice([1, 2, 2, 3])
    return 2 if case.kind in KINDS_OF_SEVERAL and size == 1 else size


def play(case: Case, rank: int) -> str:
    size = world_size(case)
    kinds = KINDS | KINDS_OF_SEVERAL if size > 1 else KINDS
    # Whatever the last case did to its group, nobody waits for it here.
    here = place(size, rank)
    try:
        return case.draw(kinds)(case.rng, here)
    finally:
        leave(size)


class Caller:
    """The calls of one thread: its own keys, in shapes that all threads have in common."""

    def __init__(self, here: Place, seed: int, op: str) -> None:
        torch.manual_seed(seed)
        q, k, v = torch.randn(2, 4, 1, 8), *torch.randn(2, 2, 2, 20, 8)
        self.op, self.comm = op, here.comm
        self.whole = Problem(q, k, v)
        self.local = self.whole.shard(BlockCyclic(here.world_size, 3), here.rank)
        self.expected = model.attention(self.whole)

    def call(self, timeout: float) -> Outcome:
        """A right result, or an ExchangeError: anything else is a fault."""
        outcome = attempt(self._call, timeout=timeout)
        if outcome.error is not None:
            outcome.refusal(("rank", "thread"), (ExchangeError,))
        else:
            model.check_attention(outcome.value, self.expected, self.whole, torch.float32)
        return outcome

    def _call(self, timeout: float) -> Any:
        arguments = decode_arguments(self.local)
        if self.op == "all_merge_states":  # whose calls only their threads tell apart
            state = call_decoder("lean_decode", arguments)
            return all_merge_states(*state, group=self.comm, timeout=timeout)
        return call_decoder(self.op, arguments, group=self.comm, timeout=timeout)


def _callers(rng: Random, here: Place, count: int) -> list[Caller]:
    return [Caller(here, seed, rng.choice(_OPS)) for seed in range(count)]


def run_threads(bodies: dict[str, Callable[[], None]], seconds: float) -> None:
    """All at once, each in a thread of its name; a fault in any is raised here."""
    faults: list[BaseException] = []

    def run(body: Callable[[], None]) -> None:
        try:
            body()
        except BaseException as error:
            faults.append(error)

    threads = [
        threading.Thread(target=run, args=(body,), name=name, daemon=True)
        for name, body in bodies.items()
    ]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
        assert not thread.is_alive(), f"thread {thread.name} hangs"
    if faults:
        raise faults[0]


def _at_once(rng: Random, here: Place) -> str:
    here.probe()  # the group is set up; what follows are calls in steady state
    count, num_calls = rng.choice([2, 2, 3]), rng.choice([4, 30])
    callers = _callers(rng, here, count)
    begin = threading.Barrier(count)

    def body(caller: Caller) -> None:
        begin.wait()
        for _ in range(num_calls):
            caller.call(_SECONDS)
            if here.comm.failed is not None:
                return

    bodies = {
        f"caller {number}": lambda caller=caller: body(caller)  # type: ignore[misc]
        for number, caller in enumerate(callers)
    }
    run_threads(bodies, num_calls * _SECONDS + AMPLE)
    return "nothing mixed"


def _handed_over(rng: Random, here: Place) -> str:
    """Another thread, which has the same name on every rank, may go on when one has ended."""
    callers = _callers(rng, here, 3)
    if rng.random() < 0.5:
        here.probe()
    for number, caller in enumerate(callers):
        run_threads({f"caller {number}": lambda c=caller: c.call(AMPLE).result()}, AMPLE + SLACK)  # type: ignore[misc]
    return "all right"


def _in_turn(rng: Random, here: Place) -> str:
    """Two threads that see to it themselves that they take turns, in one order everywhere."""
    callers = _callers(rng, here, 2)
    turns = [threading.Semaphore(1), threading.Semaphore(0)]

    def body(number: int) -> None:
        for _ in range(5):
            assert turns[number].acquire(timeout=AMPLE)
            callers[number].call(AMPLE).result()
            turns[1 - number].release()

    run_threads({"first": lambda: body(0), "second": lambda: body(1)}, AMPLE + SLACK)
    return "all right"


def _in_another_order(rng: Random, here: Place) -> str:
    """One rank's threads come the other way round: no state of one may meet one of the other."""
    op = rng.choice(_OPS)
    callers = [Caller(here, seed, op) for seed in range(2)]
    here.probe()
    order = [0, 1]
    if here.rank == rng.randrange(here.world_size):
        order.reverse()
    refused = []
    for number in order:

        def body(caller: Caller = callers[number]) -> None:
            refused.append(caller.call(_SECONDS).error is not None)

        run_threads({f"caller {number}": body}, _SECONDS + SLACK)
    assert any(refused), "threads in different orders were not noticed"
    return "noticed"


KINDS: dict[str, tuple[float, Callable[[Random, Place], str]]] = {
    "at_once": (2, _at_once),
    "handed_over": (1, _handed_over),
    "in_turn": (1, _in_turn),
}
KINDS_OF_SEVERAL: dict[str, tuple[float, Callable[[Random, Place], str]]] = {
    "in_another_order": (1, _in_another_order)
}
