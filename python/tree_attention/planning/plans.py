# SPDX-License-Identifier: BSD-3-Clause
"""The forms of a split side by side, and where one overtakes another."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace

from .arithmetic import (
    DATA,
    FORMS,
    RING,
    SPLIT_BY_HEADS,
    TENSOR,
    WHOLE,
    Seconds,
    Work,
    cache_bytes,
    exchange_bytes,
    obstacle,
    prefill_seconds,
    tensor_parallel_size,
    token_seconds,
    weights_bytes,
)
from .machines import Hosts
from .models import Model

ALL_FORMS = (*FORMS, RING, TENSOR, DATA)
MAX_CONTEXT = 1 << 26
MAX_RANKS = 1 << 14


@dataclass(frozen=True)
class Row:
    """A form, and what a rank keeps and takes in it."""

    form: str
    weights: float  # bytes
    cache: float
    exchange: float
    token: Seconds
    prefill: Seconds
    obstacle: str  # why the ranks cannot take this form, or nothing
    fits: bool  # into the memory of a rank

    @property
    def refusal(self) -> str:
        return self.obstacle or ("" if self.fits else "no room")

    @property
    def held(self) -> float:
        return self.weights + self.cache + self.exchange

    @property
    def name(self) -> str:
        return f"tree, {self.form}" if self.form in FORMS else self.form


@dataclass(frozen=True)
class Plan:
    """A model on equal ranks, and what they have to do."""

    model: Model
    hosts: Hosts
    ranks: int
    work: Work

    def row(self, form: str) -> Row:
        shape = self.model, form, self.ranks
        timed = self.model, self.hosts, form, self.ranks, self.work
        weights, cache = weights_bytes(*shape), cache_bytes(*shape, self.work)
        exchange = exchange_bytes(*shape, self.work)
        times = token_seconds(*timed), prefill_seconds(*timed)
        fits = weights + cache + exchange <= self.hosts.machine.memory
        return Row(form, weights, cache, exchange, *times, obstacle(*shape), fits)

    def rows(self) -> list[Row]:
        return [self.row(form) for form in ALL_FORMS]

    def best(self) -> Row | None:
        """The form that gives new tokens soonest, of equal ones the one with the sooner prompt."""
        able = [row for row in self.rows() if not row.refusal]
        return min(able, key=lambda row: (row.token.total, row.prefill.total), default=None)

    def at(self, context: int) -> Plan:
        return replace(self, work=replace(self.work, context=context))

    def longest(self, form: str) -> int:
        """The longest context that fits into memory, at most MAX_CONTEXT; 0: none does."""

        def is_too_long(context: int) -> bool:
            shape, work = (self.model, form, self.ranks), self.at(context).work
            held = weights_bytes(*shape) + cache_bytes(*shape, work) + exchange_bytes(*shape, work)
            return held > self.hosts.machine.memory

        return max(0, _first(is_too_long) - 1)

    def break_even(self, sharded: str, other: str) -> int | None:
        """The shortest context behind which `sharded` gives a token sooner than `other` does."""

        def is_sooner(context: int) -> bool:
            plan = self.at(context)
            timed = plan.model, plan.hosts
            own, others = (
                token_seconds(*timed, f, plan.ranks, plan.work) for f in (sharded, other)
            )
            return own.total < others.total

        found = _first(is_sooner)
        return found if found <= MAX_CONTEXT else None


def _first(holds: Callable[[int], bool]) -> int:
    """The least context for which `holds`, and so for all longer ones; else MAX_CONTEXT + 1."""
    return bisect_left(range(MAX_CONTEXT + 1), True, key=holds)


def verdicts(plan: Plan) -> list[str]:
    """From which context on a sharded cache pays, in sentences."""
    if plan.ranks == 1:
        return ["One rank has nobody to share a cache with."]
    model, longest = plan.model, plan.longest(DATA)
    sentences = ["Weights whole: a whole model does not fit on a rank."]
    if longest > 0:
        fits = f"a whole model and cache fit on a rank up to {longest:,} tokens"
        sentences = [f"Weights whole: {_pays(plan, WHOLE, DATA)}; {fits}."]
    sentences += [f"Refused: {why}." for why in (model.not_split, model.not_dealt) if why]
    if model.not_split:
        return sentences
    is_tensor = tensor_parallel_size(model, SPLIT_BY_HEADS, plan.ranks) == plan.ranks
    if is_tensor and not model.weights.experts:
        heads = f"{plan.ranks} ranks split the {model.kv_heads} heads of keys and values"
        sentences.append(f"Weights split: {heads}, and largest T is tensor parallel.")
    elif not obstacle(model, TENSOR, plan.ranks):
        sentences.append(f"Weights split: {_pays(plan, SPLIT_BY_HEADS, TENSOR)}.")
    return sentences


def _pays(plan: Plan, sharded: str, other: str) -> str:
    context = plan.break_even(sharded, other)
    if context is None:
        return f"a sharded cache gives a token no sooner than {other} at any context"
    where = f"from {context:,} tokens on" if context > 0 else "at any context"
    return f"a sharded cache gives a token sooner than {other} {where}"
