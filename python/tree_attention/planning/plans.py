# SPDX-License-Identifier: BSD-3-Clause
"""The forms of a split side by side, and where one overtakes another."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace

from .arithmetic import FORMS, SPLIT_BY_HEADS, TENSOR, WHOLE, Split, Work
from .machines import Hosts
from .models import Model

DATA = "data parallel"  # others': ranks have a whole model and sequences of their own
ALL_FORMS = (*FORMS, TENSOR, DATA)
MAX_CONTEXT, MAX_RANKS = 1 << 26, 1 << 14


@dataclass(frozen=True)
class Plan:
    """A model on equal ranks, and their work."""

    model: Model
    hosts: Hosts
    ranks: int
    work: Work

    def split(self, form: str, context: int | None = None) -> Split:
        work = replace(self.work, context=self.work.context if context is None else context)
        if form != DATA:
            return Split(self.model, form, self.ranks, work)
        most = -(-work.sequences // self.ranks)
        return Split(self.model, WHOLE, 1, replace(work, sequences=most))

    def refusal(self, form: str) -> str:
        """Reason why the ranks cannot take this form, in few words, or nothing."""
        is_too_large = self.split(form).held_bytes > self.hosts.machine.memory
        return self.split(form).obstacle or "no room" * is_too_large

    def best(self) -> str | None:
        """The form that gives new tokens soonest, of equal ones the one with the sooner prompt."""
        able = {form: self.split(form) for form in ALL_FORMS if not self.refusal(form)}
        times = {
            x: (s.token_seconds(self.hosts), s.prefill_seconds(self.hosts)) for x, s in able.items()
        }
        return min(times, key=lambda form: [x.total for x in times[form]], default=None)

    def longest(self, form: str) -> int:
        """The longest context that fits into memory, at most MAX_CONTEXT; 0: none does."""
        memory = self.hosts.machine.memory
        return max(0, _first(lambda n: self.split(form, n).held_bytes > memory) - 1)

    def break_even(self, sharded: str, other: str) -> int | None:
        """The shortest context behind which `sharded` gives a token sooner than `other` does."""

        def seconds(form: str, context: int) -> float:
            return self.split(form, context).token_seconds(self.hosts).total

        found = _first(lambda n: seconds(sharded, n) < seconds(other, n))
        return found if found <= MAX_CONTEXT else None

    def verdicts(self) -> list[str]:
        """Return in sentences what is refused, and from which context on a sharded cache pays."""
        model, longest = self.model, self.longest(DATA)
        if self.ranks == 1:
            return ["One rank has nobody to share a cache with."]
        sentences = ["Weights whole: a whole model does not fit on a rank."]
        if longest > 0:
            fits = f"a whole model and cache fit on a rank up to {longest:,} tokens"
            sentences = [f"Weights whole: {self._pays(WHOLE, DATA)}; {fits}."]
        sentences += [f"Refused: {why}." for why in (model.not_split, model.not_dealt) if why]
        if not model.not_split and not self.split(TENSOR).obstacle:
            sentences.append(f"Weights split: {self._pays(SPLIT_BY_HEADS, TENSOR)}.")
        return sentences

    def _pays(self, sharded: str, other: str) -> str:
        context = self.break_even(sharded, other)
        if context is None:
            return f"a sharded cache gives a token no sooner than {other} at any context"
        where = f"from {context:,} tokens on" if context > 0 else "at any context"
        return f"a sharded cache gives a token sooner than {other} {where}"


def _first(holds: Callable[[int], bool]) -> int:
    """Return the least context for which `holds`, and so for all longer ones, or one too many."""
    return bisect_left(range(MAX_CONTEXT + 1), True, key=holds)
