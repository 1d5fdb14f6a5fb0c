# SPDX-License-Identifier: BSD-3-Clause
"""A plan for machines that differ: what each holds, which one the others wait for, and how long a
token takes if one is left out."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from .._numbers import in_digits
from ..shares import EQUAL, ModelShares, Shares
from .arithmetic import FORMS, Seconds, Split, Work
from .machines import Link, Machine
from .models import Model
from .unequal import Group, in_words, milliseconds, until_last

# Ranks that are busy for nearly as long do not wait for each other.
_EQUAL = 1.05


@dataclass(frozen=True)
class UnequalPlan:
    """A model on machines that differ, one for each rank, and their work; with given shares, or of
    each form those with which a token takes the least time."""

    model: Model
    machines: tuple[Machine, ...]
    link: Link
    work: Work
    given: Shares | Literal["auto"] = "auto"

    @cached_property
    def groups(self) -> dict[str, Group]:
        """The machines in each form."""
        p = len(self.machines)
        sizes = {form: Split(self.model, form, p, self.work).tensor_parallel_size for form in FORMS}
        return {
            form: Group(self.model, form, self.machines, self.link, self.work, size)
            for form, size in sizes.items()
        }

    def shares(self, form: str) -> ModelShares:
        """The shares of the ranks in a form.

        Raises:
            ValueError: the model fits under no shares, or ranks of a tensor group are given unequal
                ones.
        """
        group = self.groups[form]
        if self.given == "auto":
            return group.best
        size = group.tensor_parallel_size
        return ModelShares.of("plan", self.given, len(self.machines), size)

    def refusal(self, form: str) -> str:
        """Reason why the ranks cannot take this form, in few words, or nothing."""
        group = self.groups[form]
        if obstacle := group.split(EQUAL, 0).obstacle:
            return obstacle
        try:
            shares = self.shares(form)
        except ValueError:
            return "no room" if self.given == "auto" else "uneven"
        return "" if group.fits(shares) else "no room"

    def token(self, form: str) -> Seconds:
        return until_last(self.groups[form].each_token(self.shares(form)))

    def prompt(self, form: str) -> Seconds:
        return until_last(self.each_prompt(form))

    def each_prompt(self, form: str) -> list[Seconds]:
        """Time of each rank for the prompts."""
        return self.groups[form].each_prompt(self.shares(form))

    @cached_property
    def best(self) -> str | None:
        """The form with the least time per token; of equal ones, that with the fastest prompt."""
        able = [form for form in FORMS if not self.refusal(form)]
        return min(able, key=lambda x: (self.token(x).total, self.prompt(x).total), default=None)

    def verdicts(self) -> list[str]:
        """Return in sentences who sets the pace, and what leaving a rank out gains."""
        form = self.best
        sentences = [
            f"Refused: {why}."
            for why in (self.model.not_split, self.model.prompts_not_split)
            if why
        ]
        if form is None:
            return [*sentences, *self._lacks()]
        group, token = self.groups[form], self.groups[form].each_token(self.shares(form))
        sentences += [
            self._pace("a token", token, milliseconds),
            self._pace("a prompt", self.each_prompt(form), lambda x: f"{in_digits(x)} s"),
        ]
        fastest = self if self.given == "auto" else replace(self, given="auto")
        group = self.groups[fastest.best or form]
        if self.given != "auto" and fastest.best is not None:
            sentences.append(
                f"By speed it would be {in_words(group.best)}, with {group.form} split: "
                f"{milliseconds(group.seconds)} per token."
            )
        sentences += [self._alone(group), self._left_out(group)]
        return sentences

    def _named(self, rank: int) -> str:
        return f"rank {rank} ({self.machines[rank].name})"

    def _pace(self, what: str, each: Sequence[Seconds], text: Callable[[float], str]) -> str:
        busy, until = [x.local for x in each], until_last(each)
        last, first = busy.index(max(busy)), busy.index(min(busy))
        most, least, exchange = text(busy[last]), text(busy[first]), text(until.exchange)
        if until.local <= _EQUAL * busy[first]:
            times = most if least == most else f"{least} to {most}"
            return (
                f"No rank waits long for another in {what}: they are busy for {times}, and "
                f"exchanges take {exchange}."
            )
        if until.local > _EQUAL * busy[last]:
            attention, products = (
                max(range(len(each)), key=seconds.__getitem__)
                for seconds in ([x.attention for x in each], [x.products for x in each])
            )
            return (
                f"In {what} the others wait for {self._named(attention)} in attention, "
                f"{text(until.attention)}, and for {self._named(products)} in the products with "
                f"split matrices, {text(until.products)}; exchanges take {exchange}."
            )
        return (
            f"R{self._named(last)[1:]} sets the pace of {what}: it is busy for {most}, "
            f"{self._named(first)} for {least}, and exchanges take {exchange}."
        )

    def _alone(self, group: Group) -> str:
        alone = [
            replace(group, machines=(machine,), tensor_parallel_size=1).seconds_if_it_fits
            for machine in self.machines
        ]
        fastest = alone.index(min(alone))
        if alone[fastest] == math.inf:
            return "No rank has room for the whole model and cache."
        than = ", less than all together" if alone[fastest] < group.seconds_if_it_fits else ""
        seconds = milliseconds(alone[fastest])
        return f"The fastest alone, {self._named(fastest)}, takes {seconds} per token{than}."

    def _left_out(self, group: Group) -> str:
        if group.advice:
            return f"R{group.advice[1:]}; {group.what_to_do}."
        size = group.tensor_parallel_size
        if size == len(self.machines):
            return "No rank can be left out, as all of them split the heads."
        times = group.seconds_without
        rank = times.index(min(times))
        if times[rank] == math.inf:
            return "No rank can be left out: the others have no room for the model and cache."
        return (
            f"Leaving out a rank gains nothing: without {self._named(rank)} a token takes about "
            f"{milliseconds(times[rank])} in place of {milliseconds(group.seconds)}."
        )

    def _lacks(self) -> list[str]:
        """Why no form has room."""
        for form in reversed(FORMS):
            group = self.groups[form]
            if group.split(EQUAL, 0).obstacle:
                continue
            try:
                best = group.best
            except ValueError as error:
                return [f"If {form} is split, {error}."]
            there = f"{in_words(best)}: {milliseconds(group.seconds)} per token"
            return [f"If {form} is split, there is room with {there}."]
        return []
