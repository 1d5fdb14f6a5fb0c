# SPDX-License-Identifier: BSD-3-Clause
"""Timing whole exchanges of every canonical strategy on these ranks, for "auto" to go by."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import cast

import numpy as np
import torch
import torch.distributed as dist

from .._numbers import real
from .auto.choose import CostTable, Measured
from .communicator import Communicator
from .strategies import STRATEGIES, StrategyName
from .transport.buffers import StateLayout
from .transport.process_group import Link

# The ladder of states: sequences with one query of 32 heads each, from 16 KiB to 1 MiB.
_HEAD_DIM, _NUM_HEADS = 128, 32
BATCHES = (1, 4, 16, 64)
_WARM_UP = 2
_NUM_TURNS, _MIN_ROUNDS, _MAX_ROUNDS = 4, 2, 1000
# Seconds between two rounds in which all ranks come to rest, and a share of the last round.
_PAUSE, _SLACK = 0.002, 0.3
_NUM_QUESTIONS = 9


def calibrate(
    comm: Communicator,
    device: torch.device,
    seconds: float,
    progress: Callable[[int, int], object] = lambda done, total: None,
) -> CostTable:
    """Times exchanges of every canonical strategy and size, `seconds` each.

    Collective, on a communicator of at least two ranks; the same table on all of them. Raises
    ExchangeError where a rank was lost or stalled.
    """
    seconds = real("calibrate", "seconds", seconds)
    # Ranks that measure for other times would send other numbers of messages. This finds the nodes.
    comm.agree((("device", device.type), ("seconds", seconds)), op="calibrate")
    # Changing from one call to another compares signatures, which must not be timed: exchanges get
    # a communicator of their own, and do not go by an earlier table.
    exchanging = Communicator(comm.link.group, comm.timeout, nodes=comm.topology.nodes)
    o, lse = torch.ones(1, 1, 1, 8, device=device), torch.zeros(1, 1, 1, device=device)
    exchanging.all_merge_states(o, lse, strategy="all_gather")
    unavailable = exchanging.unavailable(device)
    names = [name for name, s in STRATEGIES.items() if s.is_canonical and name not in unavailable]
    with comm.begin("calibrate clocks") as call:
        clock = call.run((), partial(Clock.agree, comm.link, device), is_repeatable=False)

    def largest(values: list[float], deadline: float) -> list[float]:
        tensor = torch.tensor(values, dtype=torch.float64, device=device)
        comm.link.all_reduce(tensor, dist.ReduceOp.MAX, deadline)
        return tensor.tolist()

    def rounds(run: Callable[..., object], deadline: float) -> list[float]:
        """Times of rounds that all ranks begin together, each until the last rank is done."""

        def once() -> None:
            run(timeout=max(1e-3, deadline - time.monotonic()))

        once()  # which prepares it
        begin = clock.now()
        for _ in range(_WARM_UP):
            once()
        [a_round] = largest([(clock.now() - begin) / _WARM_UP], deadline)
        interval = (1 + _SLACK) * a_round + _PAUSE
        count = max(_MIN_ROUNDS, min(int(seconds_of_turn / interval), _MAX_ROUNDS))
        [last] = largest([clock.now()], deadline)
        starts, ends = [], []
        for i in range(1, count + 1):
            time.sleep(max(0.0, last + i * interval - clock.now()))
            starts.append(clock.now())
            once()
            ends.append(clock.now())
        times = np.array(largest(starts + ends, deadline)).reshape(2, count)
        return (times[1] - times[0]).tolist()

    seconds_of_turn = seconds / _NUM_TURNS
    limit = comm.timeout + 10 * seconds_of_turn
    measured: list[Measured] = []
    for batch in BATCHES:
        shape = (batch, _NUM_HEADS, 1)
        num_bytes = StateLayout(shape, _HEAD_DIM, torch.float32).num_bytes
        o = torch.ones(*shape, _HEAD_DIM, device=device)
        lse = torch.zeros(shape, device=device)
        # Strategies take turns, because machines and networks change their pace.
        times: dict[str, list[float]] = {name: [] for name in names}
        for turn in range(_NUM_TURNS):
            for i, name in enumerate(names, 1):
                strategy = cast(StrategyName, name)
                run = partial(exchanging.all_merge_states, o, lse, strategy=strategy)
                with comm.begin(f"calibrate {name} {num_bytes}", limit) as call:
                    times[name] += call.run((), partial(rounds, run), is_repeatable=False)
                done = (len(measured) * _NUM_TURNS) + turn * len(names) + i
                progress(done, len(BATCHES) * len(names) * _NUM_TURNS)
        measured += [Measured(n, num_bytes, float(np.median(t))) for n, t in times.items()]
    return CostTable(comm.link.backend(device), comm.topology.nodes, tuple(measured))


@dataclass(frozen=True)
class Clock:
    """A clock that reads alike on all ranks, up to half the difference of a link's directions."""

    device: torch.device
    offset: float  # seconds to add to this rank's own clock

    def now(self) -> float:
        """The time at which what was queued on the device is done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter() + self.offset

    @staticmethod
    def agree(link: Link, device: torch.device, deadline: float) -> "Clock":
        """Collective: every rank asks rank 0 for the time, and goes by the quickest answer."""
        own = Clock(device, 0.0)
        time_of_0 = torch.zeros(1, dtype=torch.float64, device=device)
        question = torch.zeros(1, dtype=torch.uint8, device=device)
        answer = time_of_0.view(torch.uint8)

        offset = 0.0
        for rank in range(1, link.world_size):
            is_0, is_rank = link.rank == 0, link.rank == rank
            at_rank, at_0 = {0: question} if is_rank else {}, {rank: question} if is_0 else {}
            ask = link.messages(at_0, at_rank, device, has_call_id=False)
            at_rank, at_0 = {0: answer} if is_rank else {}, {rank: answer} if is_0 else {}
            reply = link.messages(at_rank, at_0, device, tag=1, has_call_id=False)
            quickest = float("inf")
            for _ in range(_NUM_QUESTIONS):
                reply.post()
                begin = own.now()
                ask.run(deadline)
                if is_0:
                    time_of_0.fill_(own.now())
                reply.run(deadline)
                end = own.now()
                if is_rank and end - begin < quickest:
                    quickest = end - begin
                    offset = float(time_of_0) - (begin + end) / 2
        return Clock(device, offset)
