# SPDX-License-Identifier: BSD-3-Clause
"""Shares for machines that differ, by the planner's arithmetic: how much each gets of a model and
its cache, and which are better left out.

Ranks with split weights wait for each other twice in a layer: when the states of their keys merge,
and when the products of their parts of the matrices are added up. A token takes as long as the
slowest rank needs for its keys, plus the slowest for its matrices, plus the exchanges. So the cache
and the weights have shares of their own: every rank has whole copies of some matrices, which a slow
one makes up for by fewer keys. All results are functions of the numbers given, so that ranks with
the same numbers have the same shares.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice

from .._numbers import in_digits
from ..shares import EQUAL, MAX_SHARE, ModelShares, Shares, as_shares
from .arithmetic import PROMPTS, SPLIT, Seconds, Split, Work
from .machines import Hosts, Link, Machine
from .models import Model

# Shares are equal unless others make a token faster by this part: what is measured differs a little
# from run to run, and bits depend on shares.
_LEAST_GAIN = 0.05
# Sums of shares that are tried first: a cycle of the cache has as many blocks.
_FEW = 16
_OF_MEMORY = 0.9  # the rest is for activations
# A machine that is faster than this part of the fastest is as good as the fastest.
_AS_FAST = 0.85
_STEPS = 60  # of a bisection: to the last bits of a float
_WEIGHTS, _CACHE = ("weights",), ("cache",)
_BOTH = _WEIGHTS + _CACHE


@dataclass(frozen=True)
class Group:
    """A model over machines, one for each rank, and the work of all of them."""

    model: Model
    form: str
    machines: tuple[Machine, ...]
    link: Link
    work: Work
    tensor_parallel_size: int = 1

    def split(self, shares: ModelShares, rank: int) -> Split:
        """The part of the model that one rank holds, and what it sends."""
        size, p = self.tensor_parallel_size, len(self.machines)
        return Split(self.model, self.form, p, self.work, shares, rank, size)

    @property
    def has_split_weights(self) -> bool:
        return self.split(EQUAL, 0).has_split_weights

    def rank_token(self, shares: ModelShares, rank: int) -> Seconds:
        """Time of a rank in a token."""
        return self.split(shares, rank).token_seconds(Hosts(self.machines[rank], self.link))

    def each_token(self, shares: ModelShares) -> list[Seconds]:
        """Time of each rank in a token."""
        return [self.rank_token(shares, rank) for rank in range(len(self.machines))]

    def each_prompt(self, shares: ModelShares) -> list[Seconds]:
        """Time of each rank for the prompts."""
        return [
            self.split(shares, rank).prefill_seconds(Hosts(machine, self.link))
            for rank, machine in enumerate(self.machines)
        ]

    def token_seconds(self, shares: ModelShares) -> float:
        """Time of a token until the last rank is done."""
        return until_last(self.each_token(shares)).total

    def fits(self, shares: ModelShares) -> bool:
        return all(
            self.split(shares, rank).held_bytes <= _OF_MEMORY * machine.memory
            for rank, machine in enumerate(self.machines)
        )

    @cached_property
    def best(self) -> ModelShares:
        """The shares with the least time of a token under each machine's memory; equal ones also
        where these are nearly as fast.

        Raises:
            ValueError: some machine's memory is too small under all shares.
        """
        found = min(self._candidates(), key=self.token_seconds, default=None)
        if found is None:
            raise ValueError(self._lack())
        limit = (1 + _LEAST_GAIN) * self.token_seconds(found)
        if self.fits(EQUAL) and self.token_seconds(EQUAL) <= limit:
            found = EQUAL
        return found._replace(prompt=self._by_arithmetic if self.form == PROMPTS else None)

    @property
    def seconds(self) -> float:
        """The time of a token under the best shares."""
        return self.token_seconds(self.best)

    def without(self, ranks: Sequence[int]) -> "Group":
        """The same model over the other machines."""
        return replace(
            self, machines=tuple(m for r, m in enumerate(self.machines) if r not in ranks)
        )

    @cached_property
    def unhelpful(self) -> tuple[int, ...]:
        """The slowest ranks, as many as make the time of a token least if they are left out. Ranks
        that are about as fast as the fastest are left out only where that gains something."""
        speeds = self._speeds
        order = sorted(range(self._units), key=lambda unit: (speeds[unit], -unit))
        num_slow = sum(speed < _AS_FAST * max(speeds) for speed in speeds)

        def ranks(count: int) -> tuple[int, ...]:
            return tuple(sorted(r for unit in order[:count] for r in self._members(unit)))

        def seconds(count: int) -> float:
            least = 1.0 if count <= num_slow else 1 + _LEAST_GAIN
            return least * self.without(ranks(count)).seconds_if_it_fits

        return ranks(min(range(self._units), key=seconds))

    @cached_property
    def seconds_without(self) -> list[float]:
        """The time of a token without each rank and its tensor group, or infinity where the others
        have no room."""
        units = [self.without(self._members(u)).seconds_if_it_fits for u in range(self._units)]
        return [seconds for seconds in units for _ in range(self.tensor_parallel_size)]

    @property
    def _by_arithmetic(self) -> Shares:
        """Shares of a prompt's tokens, which ranks with replicated weights split."""
        return by_speed([machine.arithmetic for machine in self.machines])

    @property
    def advice(self) -> str:
        """A sentence on ranks that make a token slower, with both times, or nothing."""
        ranks, machines = self.unhelpful, self.machines
        if not ranks:
            return ""
        speeds = [machine.memory_bandwidth for machine in machines]
        fastest = speeds.index(max(speeds))
        named = ", ".join(f"rank {rank} ({machines[rank].name})" for rank in ranks)
        rates = ", ".join(gigabytes(speeds[rank]) for rank in ranks)
        end, them = ("", "them") if len(ranks) > 1 else ("s", "it")
        seconds = self.seconds_if_it_fits
        if seconds == math.inf:
            told = f"the model does not fit into memory with {them}, and a token takes about"
        else:
            exchange = milliseconds(until_last(self.each_token(self.best)).exchange)
            takes = f"{milliseconds(seconds)} ({exchange} in exchanges)"
            told = f"a token takes about {takes} with {them} and"
        sentence = (
            f"{named} read{end} {rates} GB/s and rank {fastest} {gigabytes(speeds[fastest])}: "
            f"{told} {milliseconds(self.without(ranks).seconds)} without"
        )
        if not self.has_split_weights:
            whole = gigabytes(self.model.weights.num_bytes)
            sentence += f", as every rank reads all {whole} GB of weights for each token"
        return sentence

    @property
    def what_to_do(self) -> str:
        """Words on what helps where ranks make a token slower."""
        them = "them" if len(self.unhelpful) > 1 else "it"
        can_split = not self.has_split_weights and not self.model.not_split
        split = replace(self, form=SPLIT, tensor_parallel_size=1)
        if can_split and split.seconds_if_it_fits < self.without(self.unhelpful).seconds:
            return f"split the weights with from_pretrained, or start without {them}"
        memory = gigabytes(sum(self.machines[rank].memory for rank in self.unhelpful))
        return f"start without {them}, or keep {them} for {memory} GB of memory"

    @property
    def seconds_if_it_fits(self) -> float:
        """The time of a token under the best shares, or infinity."""
        try:
            return self.seconds
        except ValueError:
            return math.inf

    @property
    def _split_things(self) -> tuple[str, ...]:
        return _BOTH if self.has_split_weights else _CACHE

    @property
    def _units(self) -> int:
        """The number of tensor groups, whose ranks have equal shares."""
        return len(self.machines) // self.tensor_parallel_size

    def _members(self, unit: int) -> range:
        return range(unit * self.tensor_parallel_size, (unit + 1) * self.tensor_parallel_size)

    def _with(
        self, shares: ModelShares, names: Sequence[str], counts: Sequence[int]
    ) -> ModelShares:
        """These shares, but those of `names` as tensor groups have the counts."""
        found = as_shares("plan", "shares", counts, self._units)
        own: dict[str, Shares] = dict.fromkeys(names, found)
        if found is not None and "weights" in own:
            own["weights"] = tuple(x for x in found for _ in range(self.tensor_parallel_size))
        return shares._replace(**own)

    def _lines(
        self, names: Sequence[str], shares: ModelShares | None
    ) -> list[tuple[float, float, float]]:
        """For each tensor group: the seconds of a token if it has nothing of what `names` are
        shares of, the seconds that are added if it gets all, and the part of this that fits into
        its memory next to what else it has by `shares`; None: nothing. Of the cache alone these are
        seconds of attention, of weights alone of products."""
        found = []
        for unit in range(self._units):
            own = [int(u == unit) for u in range(self._units)]
            others = [1 - x for x in own] if self._units > 1 else own
            rest = self._with(EQUAL, _BOTH, others) if shares is None else shares
            whole, nothing = (self._with(rest, names, counts) for counts in (own, others))
            base, more, room = 0.0, 0.0, 1.0
            for rank in self._members(unit):
                least, most = (
                    _seconds_of(names, self.rank_token(x, rank)) for x in (nothing, whole)
                )
                base, more = max(base, least), max(more, most - least)
                held = self.split(nothing, rank).held_bytes
                each = self.split(whole, rank).held_bytes - held
                memory = _OF_MEMORY * self.machines[rank].memory
                room = min(room, (memory - held) / each if each else float(memory >= held))
            found.append((base, more, room))
        return found

    @property
    def _speeds(self) -> list[float]:
        return [1 / (base + more) for base, more, _ in self._lines(self._split_things, EQUAL)]

    def _candidates(self) -> list[ModelShares]:
        """Shares near the best ones that fit; none only if the model fits under no shares."""
        found: list[ModelShares] = []
        # The same shares of weights and cache: some fit if any shares do, maybe of a large sum.
        for count, shares in enumerate(self._near(self._split_things, EQUAL), start=1):
            if count > _FEW and found:
                break
            if self.fits(shares):
                found.append(shares)
        if not found or not self.has_split_weights or self._units == 1:
            return found
        # Shares of their own, if memory is no limit.
        machines = tuple(replace(machine, memory=math.inf) for machine in self.machines)
        free = replace(self, machines=machines)
        fastest = min(islice(free._near(_WEIGHTS, EQUAL), _FEW), key=free.token_seconds)
        fastest = min(islice(free._near(_CACHE, fastest), _FEW), key=free.token_seconds)
        if self.fits(fastest):
            return [*found, fastest]
        # Otherwise the best of one, and of the other what then has room, both ways.
        starts: list[ModelShares] = []
        for first in (_WEIGHTS, _CACHE):
            some = islice(self._near(first, None), _FEW)
            starts += sorted(some, key=lambda x: self._phase_seconds(first, x))[:1]
        for first, start in zip((_WEIGHTS, _CACHE), starts, strict=False):
            found += self._fitting(_CACHE if first == _WEIGHTS else _WEIGHTS, start)
        # Memory may have held back the one that came second.
        for names in (_CACHE, _WEIGHTS, _CACHE):
            found += self._fitting(names, min(found, key=self.token_seconds))
        return found

    def _fitting(self, names: Sequence[str], shares: ModelShares) -> list[ModelShares]:
        return [x for x in islice(self._near(names, shares), _FEW) if self.fits(x)]

    def _phase_seconds(self, names: Sequence[str], shares: ModelShares) -> float:
        return max(_seconds_of(names, seconds) for seconds in self.each_token(shares))

    def _near(self, names: Sequence[str], shares: ModelShares | None) -> Iterator[ModelShares]:
        """Shares of `names` near the real numbers that give all tensor groups the same time, as far
        as they have room next to what else they have by `shares`, with ever larger sums."""
        lines = self._lines(names, shares)
        if any(room < 0 for *_, room in lines):
            return
        low, high = 0.0, max(base + more for base, more, _ in lines)
        for _ in range(_STEPS):
            middle = (low + high) / 2
            is_enough = sum(_parts_within(middle, lines)) >= 1
            low, high = (low, middle) if is_enough else (middle, high)
        parts = _parts_within(high, lines)
        if (total := sum(parts)) < 1 - 1e-9:
            return
        for count in range(1, MAX_SHARE + 1):
            counts = _rounded([part / total for part in parts], count)
            yield self._with(shares or EQUAL, names, counts)

    def _lack(self) -> str:
        """Which machine has too little memory."""
        rooms, shares = [room for *_, room in self._lines(self._split_things, EQUAL)], EQUAL
        if min(rooms) < 0:
            unit = rooms.index(min(rooms))
            if self._units > 1:
                others = [int(u != unit) for u in range(self._units)]
                shares = self._with(EQUAL, self._split_things, others)
            what = "whatever its share is"
        else:
            unit = rooms.index(max(rooms))
            counts = _rounded([room / (sum(rooms) or 1) for room in rooms], _FEW)
            shares = self._with(EQUAL, self._split_things, counts)
            what = "with the shares that need least of all"
        rank = min(self._members(unit), key=lambda r: self.machines[r].memory)
        held, machine = self.split(shares, rank).held_bytes, self.machines[rank]
        return (
            f"the model fits under no shares: rank {rank} ({machine.name}) needs {held:,.0f} bytes "
            f"{what}, and {_OF_MEMORY:.0%} of its memory are {_OF_MEMORY * machine.memory:,.0f}"
        )


def _seconds_of(names: Sequence[str], seconds: Seconds) -> float:
    """Where the shares of `names` alone make a difference: the rest is a constant."""
    if tuple(names) == _BOTH:
        return seconds.local
    return seconds.attention if tuple(names) == _CACHE else seconds.products


def _parts_within(seconds: float, lines: Sequence[tuple[float, float, float]]) -> list[float]:
    """The parts that tensor groups can do in a time."""
    return [
        max(0.0, min(room, (seconds - base) / more if more else 1.0)) for base, more, room in lines
    ]


def _rounded(parts: Sequence[float], count: int) -> list[int]:
    """Integers with the sum `count` in proportion to parts of 1, by largest remainders."""
    exact = [part * count for part in parts]
    found = [int(x) for x in exact]
    order = sorted(range(len(parts)), key=lambda i: (found[i] - exact[i], i))
    for i in order[: max(0, count - sum(found))]:
        found[i] += 1
    return found


def by_speed(speeds: Sequence[float]) -> Shares:
    """Shares of work that takes as long as its share by a rank's speed, such as a prompt's tokens;
    None: equal ones, also where these are nearly as fast."""

    def seconds(shares: Sequence[int]) -> float:
        pairs = zip(shares, speeds, strict=True)
        return max(share / speed for share, speed in pairs) / sum(shares)

    parts = [speed / sum(speeds) for speed in speeds]
    found = min((_rounded(parts, count) for count in range(1, _FEW + 1)), key=seconds)
    if seconds([1] * len(speeds)) <= (1 + _LEAST_GAIN) * seconds(found):
        return None
    return as_shares("plan", "shares", found, len(speeds))


def until_last(each: Sequence[Seconds]) -> Seconds:
    """Time until the last rank is done: the others wait for it in their next exchange."""
    attention, products = max(x.attention for x in each), max(x.products for x in each)
    return Seconds(attention, products, max(x.exchange for x in each))


def in_numbers(shares: ModelShares) -> str:
    """Shares of the weights and of the cache as a text, once where they are the same."""
    weights, cache = (
        "even" if x is None else ", ".join(map(str, x)) for x in (shares.weights, shares.cache)
    )
    if weights == cache:
        return cache
    return f"cache {cache}" if shares.weights is None else f"{weights}; cache {cache}"


def in_words(shares: ModelShares) -> str:
    numbers = in_numbers(shares)
    return "equal shares" if numbers == "even" else f"shares {numbers}"


def gigabytes(value: float) -> str:
    return in_digits(value / 1e9)


def milliseconds(seconds: float) -> str:
    return f"{in_digits(1e3 * seconds)} ms"
