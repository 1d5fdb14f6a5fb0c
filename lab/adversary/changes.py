# SPDX-License-Identifier: BSD-3-Clause
"""One rank alone that makes another call, or another number of calls, amid those of the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import torch
from torch import Tensor

from helpers import Problem
from tree_attention import BlockCyclic, all_merge_states, strategies

from . import model
from .cases import Case
from .ops import call_decoder, check_merged, decode_arguments
from .outcome import Outcome, attempt
from .places import Place

_SECONDS = 10.0  # of a call: an error comes long before


@dataclass(frozen=True)
class Call:
    """A call of which every rank knows the right result; `seed` decides the numbers in it."""

    op: str
    seed: int
    batch: int = 1
    seqlen_q: int = 1
    head_dim: int = 8
    options: tuple[tuple[str, Any], ...] = ()

    def make(self, here: Place, timeout: float = _SECONDS) -> Outcome:
        """A right result, or an error that names rank and field."""
        torch.manual_seed(self.seed)
        makers = {
            "all_reduce": self._sum,
            "all_gather": self._gather,
            "all_merge_states": self._merge,
        }
        call, check = makers.get(self.op, self._decode)(here)
        outcome = attempt(call, timeout=timeout)
        if outcome.error is None:
            check(outcome.value)
        else:
            outcome.disagreement()
        return outcome

    def _decode(self, here: Place) -> tuple[Callable[..., Any], Callable[[Any], None]]:
        q = torch.randn(self.batch, 4, self.seqlen_q, self.head_dim)
        k, v = torch.randn(2, self.batch, 2, 20, self.head_dim)
        problem = Problem(q, k, v)
        local = problem.shard(BlockCyclic(here.world_size, 3), here.rank)
        arguments = decode_arguments(local)

        def call(timeout: float) -> Any:
            more = dict(self.options) | {"group": here.comm, "timeout": timeout}
            return call_decoder(self.op, arguments, **more)

        def check(found: Any) -> None:
            model.check_attention(found, model.attention(problem), problem, torch.float32)

        return call, check

    def _sum(self, here: Place) -> tuple[Callable[..., Any], Callable[[Any], None]]:
        parts = torch.randn(here.world_size, self.batch, self.head_dim).unbind()

        def check(found: Tensor) -> None:
            assert torch.equal(found, model.all_reduce(parts, torch.float32)), "a wrong sum"

        return lambda timeout: here.comm.all_reduce(parts[here.rank], timeout=timeout), check

    def _gather(self, here: Place) -> tuple[Callable[..., Any], Callable[[Any], None]]:
        whole = torch.randn(self.batch, here.world_size * self.head_dim)
        own = whole.tensor_split(here.world_size, 1)[here.rank]
        counts = [self.head_dim] * here.world_size

        def check(found: Tensor) -> None:
            assert torch.equal(found, whole), "wrong parts were gathered"

        return lambda timeout: here.comm.all_gather(own, counts, 1, timeout=timeout), check

    def _merge(self, here: Place) -> tuple[Callable[..., Any], Callable[[Any], None]]:
        o = torch.randn(here.world_size, self.batch, 2, self.seqlen_q, self.head_dim)
        lse = torch.randn(here.world_size, self.batch, 2, self.seqlen_q)

        def call(timeout: float) -> Any:
            own = o[here.rank], lse[here.rank]
            return all_merge_states(*own, group=here.comm, timeout=timeout, **dict(self.options))

        return call, lambda found: check_merged(found, (o, lse), torch.float32)


OPS = ("tree_decode", "tree_decode", "tree_decode", "ring_decode", "ring_pass_q_decode",
        "all_merge_states", "all_reduce", "all_gather")  # fmt: skip
# Ranks compare queries, and see by them which of two equal calls another one is in.
_OPS_WITH_QUERIES = ("tree_decode", "ring_decode", "ring_pass_q_decode")


def _draw_call(rng: Random, ops: Sequence[str] = OPS) -> Call:
    op = rng.choice(ops)
    options: tuple[tuple[str, Any], ...] = ()
    if op in ("tree_decode", "all_merge_states"):
        names = [name for name in strategies() if name != "one_shot"]  # which needs GPUs
        options = (("strategy", rng.choice(["auto", *names])),)
    return Call(op, rng.getrandbits(31), rng.choice([1, 2]), options=options)


def _draw_calls(rng: Random, *, equal: bool, ops: Sequence[str] = _OPS_WITH_QUERIES) -> list[Call]:
    """Numbers differ in all of them, and shapes, options and operators in none if `equal`."""
    kinds = [_draw_call(rng, ops) for _ in range(1 if equal else rng.choice([1, 2, 3]))]
    return [replace(rng.choice(kinds), seed=rng.getrandbits(31)) for _ in range(rng.randint(3, 12))]


def _changed(rng: Random, call: Call) -> Call:
    changes = [{"batch": 3 - call.batch}, {"batch": 5}, {"head_dim": 16}]
    if call.op not in ("all_reduce", "all_gather"):
        changes.append({"seqlen_q": 2})
    if call.op in ("tree_decode", "ring_decode"):
        changes += [{"options": (*call.options, ("softcap", 2.0))},
                    {"options": (*call.options, ("softmax_scale", 0.3))}]  # fmt: skip
    if call.op in ("tree_decode", "all_merge_states"):
        changes.append({"options": (("payload_dtype", torch.bfloat16),)})
        changes.append({"options": (*call.options, ("out_dtype", torch.float16))})
    changes.append({"op": rng.choice([op for op in OPS if op != call.op]), "options": ()})
    return replace(call, **rng.choice(changes))


def change(case: Case, here: Place) -> str:
    """One call of one rank has another shape, option or operator."""
    calls = _draw_calls(case.rng, equal=False, ops=OPS)
    number = case.rng.randrange(len(calls))
    changed = _changed(case.rng, calls[number])
    return _play(case.rng, here, calls, [*calls[:number], changed, *calls[number + 1 :]])


def swap(case: Case, here: Place) -> str:
    """One rank makes two calls the other way round."""
    calls = _draw_calls(case.rng, equal=case.rng.random() < 0.5)
    number = case.rng.randrange(len(calls) - 1)
    first, second = calls[number : number + 2]
    return _play(case.rng, here, calls, [*calls[:number], second, first, *calls[number + 2 :]])


def skip(case: Case, here: Place) -> str:
    """One rank leaves out one of many calls."""
    calls = _draw_calls(case.rng, equal=case.rng.random() < 0.8)
    number = case.rng.randrange(len(calls) - 1)  # after the last one it would only be late
    return _play(case.rng, here, calls, [*calls[:number], *calls[number + 1 :]])


def again(case: Case, here: Place) -> str:
    """One rank makes a call twice."""
    calls = _draw_calls(case.rng, equal=case.rng.random() < 0.8)
    number = case.rng.randrange(len(calls) - 1)
    return _play(case.rng, here, calls, [*calls[: number + 1], *calls[number:]])


def _play(rng: Random, here: Place, calls: Sequence[Call], others: Sequence[Call]) -> str:
    """Every rank has an error where one rank's calls are no longer those of all, and goes on."""
    victim = rng.randrange(here.world_size)
    if rng.random() < 0.8:
        here.probe()  # what follows are calls in steady state
    error = None
    for call in others if here.rank == victim else calls:
        error = call.make(here).error
        if error is not None:
            break
    assert error is not None, f"rank {victim} was unlike the others, and this one did not notice"
    here.probe()
    for call in calls[:2]:
        call.make(here).result()
    return "ExchangeError"


KINDS: dict[str, tuple[float, Callable[[Case, Place], str]]] = {
    "change": (3, change),
    "swap": (1.5, swap),
    "skip": (2, skip),
    "again": (1.5, again),
}
