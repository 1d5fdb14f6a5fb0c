# SPDX-License-Identifier: BSD-3-Clause
"""One rank, which clusters.py and contexts.py run on every host, and which times exchanges
and rings over the real network, with fake attention."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.harness.ranks import available_strategies, choice_of, run_rank
from tree_attention import ring_decode, ring_pass_q_decode, tree_decode
from tree_attention.exchange import Communicator, GivenStrategy

from ..papers.tree_allreduce import registered
from ..simulation import RING, RING_PASS_Q
from .fake_attention import (
    DTYPE,
    HEAD_DIM,
    NUM_HEADS,
    faked_attention,
    merged,
    problem_of,
    shard_of,
)

AUTO = "auto"
_RINGS: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    RING: ring_decode,
    RING_PASS_Q: ring_pass_q_decode,
}
_MAX_ROUNDS, _MAX_CALLS = 30, 5
# Between two calls, for the ranks to go to sleep and wake up together.
_PAUSE = 0.003
# From agreeing on a time until then: the last rank to hear of it is some steps behind the first.
_AHEAD = 0.03
# A call of so many seconds is not repeated to warm up.
_LONG = 2.0
_TIMEOUT = 300.0

Times = list[tuple[float, float]]


class Timer:
    """Starts calls at times that all ranks agree on: hosts of one machine share its clock."""

    def __init__(self, calls: Mapping[str, Callable[[], Any]]) -> None:
        self._calls = calls
        self.last: dict[str, float] = {}  # seconds of the last call, here
        self.times: dict[str, Times] = {name: [] for name in calls}

    def warm_up(self, name: str) -> bool:
        """Returns whether that took long on any rank."""
        begin = time.monotonic()
        self._calls[name]()
        self.last[name] = time.monotonic() - begin
        return _largest([self.last[name]])[0] > _LONG

    def run(self, seconds: float, min_rounds: int) -> None:
        """Rounds of all methods, quick ones several times, each round in an order of its own:
        drift of the machine, and what the one before leaves behind, meet all alike."""
        rounds, done = min_rounds, 0
        numbers = dict.fromkeys(self._calls, 1)
        while done < rounds:
            *durations, now = _largest([*self.last.values(), time.monotonic()])
            slots = {
                name: taken + min(0.3 * taken, 0.2) + _PAUSE
                for name, taken in zip(self.last, durations, strict=True)
            }
            if done == 0:
                share = 0.2 * max(slots.values())
                numbers = {n: min(max(int(share / s), 1), _MAX_CALLS) for n, s in slots.items()}
                a_round = sum(numbers[name] * slot for name, slot in slots.items())
                rounds = min(max(int(seconds / a_round), min_rounds), _MAX_ROUNDS)
            order = Random(done).sample(list(self._calls), len(self._calls))
            self._round(now + _AHEAD, order, slots, numbers)
            done += 1

    def _round(
        self,
        start: float,
        order: Sequence[str],
        slots: Mapping[str, float],
        numbers: Mapping[str, int],
    ) -> None:
        for name in order:
            for _ in range(numbers[name]):
                time.sleep(max(0.0, start - time.monotonic()))
                begin = time.monotonic()
                self._calls[name]()
                end = time.monotonic()
                self.times[name].append((begin, end))
                self.last[name] = end - begin
                start += slots[name]


def run_case(case: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Times and counts the methods of a case; the same on every rank."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(case["batch"], NUM_HEADS, 1, HEAD_DIM, generator=generator).to(DTYPE)
    k, v = shard_of(rank, case["batch"], case["keys"], case.get("one_memory", False))
    expected = merged(q, world_size)
    # One communicator for each method, as changing the call would compare signatures again.
    possible = {*available_strategies(Communicator(timeout=_TIMEOUT)), AUTO, *_RINGS}
    comms = {
        method: Communicator(timeout=_TIMEOUT) for method in case["methods"] if method in possible
    }

    def decode(method: str) -> tuple[Tensor, Tensor]:
        if method in _RINGS:
            return _RINGS[method](q, k, v, group=comms[method])
        strategy = cast(GivenStrategy, method)
        return tree_decode(q, k, v, group=comms[method], strategy=strategy)

    def counts_of(method: str) -> tuple[int, int, int]:
        return comms[method].bytes_sent, comms[method].link.num_operations, _wire_bytes()

    results: dict[str, tuple[Tensor, Tensor]] = {}

    def call(method: str) -> Callable[[], None]:
        def once() -> None:
            results[method] = decode(method)

        return once

    timer = Timer({method: call(method) for method in comms})
    counts = {}
    with faked_attention(case["seconds_per_key"]):
        for method in comms:
            before = counts_of(method)
            if not timer.warm_up(method):
                before = counts_of(method)  # without what the first call compares
                timer.warm_up(method)
            counts[method] = [b - a for a, b in zip(before, counts_of(method), strict=True)]
        timer.run(seconds, case["min_rounds"])
    methods = {
        method: _together(timer.times[method], counts[method], is_right(results[method], expected))
        for method in comms
    }
    if AUTO in methods:
        layout = problem_of(case["batch"], case["keys"]).layout
        methods[AUTO]["chosen"] = choice_of(comms[AUTO], layout).strategy
    return methods


def is_right(result: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> bool:
    (o, lse), (o_expected, lse_expected) = result, expected
    right = torch.allclose(o.float(), o_expected, rtol=2**-7, atol=1e-6)
    return right and torch.allclose(lse, lse_expected, atol=1e-5)


def _together(times: Times, counts: Sequence[int], right: bool) -> dict[str, Any]:
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, (times, counts, right))
    sent, rounds, wire = (max(values) for values in zip(*(c for _, c, _ in every), strict=True))
    return {
        # From the last rank's start to the last rank's end.
        "seconds": [
            round(max(end for _, end in ranks) - max(start for start, _ in ranks), 7)
            for ranks in zip(*(times for times, _, _ in every), strict=True)
        ],
        "bytes": sent,
        "rounds": rounds,
        "wire_bytes": wire,
        "right": all(right for _, _, right in every),
    }


def _largest(values: Sequence[float]) -> list[float]:
    """The largest of all ranks' values, one by one."""
    tensor = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return [float(value) for value in tensor]


def _wire_bytes() -> int:
    """Return the bytes that this host has sent, with all headers and acknowledgements."""
    lines = (line.split(":") for line in Path("/proc/net/dev").read_text().splitlines()[2:])
    return sum(int(f.split()[8]) for name, f in lines if name.strip() in ("net0", "node0"))


def main(specification: Path, out: Path) -> None:
    spec = json.loads(specification.read_text())
    with registered():
        run_rank(out, lambda ranks: [run_case(case, spec["seconds"]) for case in spec["cases"]])


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
