# SPDX-License-Identifier: BSD-3-Clause
"""Plays cases on ranks, compares what ranks say, and finds the one line that repeats a fault."""

from __future__ import annotations

import importlib
import math
import re
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from distributed import RankFailure, preload, run_ranks

from .cases import DRAWN, Case

# What torch imports when it compiles, or is told to be deterministic: once for all ranks.
preload("torch._dynamo", "torch._inductor.config", "lab.adversary.ranks", "lab.adversary.threads")

PARTS = (
    *("ops", "layouts", "ranks", "threads", "sessions", "differing", "snapshots", "callers"),
    *("late", "environments"),
)
# Of one world, of one that has to import everything, and of each case in it.
_WORLD_SECONDS, _IMPORT_SECONDS, _CASE_SECONDS = 60.0, 240.0, 5.0
_FAULT, _DIFFER = "FAULT ", "the ranks differ"
_REASON = re.compile(rf"{_FAULT}.*")
_NAMED = re.compile(rf"\bcase (\d+): {_FAULT}")
_OF_A_RANK = re.compile(r"^rank \d+ of world .*\n(.*)", re.MULTILINE)


@dataclass(frozen=True)
class Finding:
    cases: list[Case]
    text: str
    again: tuple[str, ...] = ()  # what cases of these did that were played again, each alone

    def __str__(self) -> str:
        first, last = self.cases[0], self.cases[-1]
        span = "" if first == last else f"-{last.index}"
        reasons = dict.fromkeys(_REASON.findall(self.text))
        return "\n".join(
            [f"python -m lab.adversary {first}{span}", *reasons, *self.again, self.text]
        )


@dataclass(frozen=True)
class World:
    """Ranks that play cases one after the other, perhaps in processes that are ended afterwards;
    with a hash seed, in interpreters of their own."""

    size: int
    is_fresh: bool
    hash_seed: int | None


def world_of(case: Case) -> World:
    module = importlib.import_module(f"lab.adversary.{case.part}")
    hash_seed = module.hash_seed(case) if hasattr(module, "hash_seed") else None
    return World(module.world_size(case), getattr(module, "OWN_PROCESSES", False), hash_seed)


# By part and kind, of what was played on ranks that had no fault.
counts: Counter[str] = Counter()


def summary(found_in: Counter[str]) -> str:
    """How often each kind was played, and how many faults each part has."""
    lines = []
    for part in PARTS:
        kinds = [f"{kind.split()[1]} {n}" for kind, n in counts.items() if kind.split()[0] == part]
        if kinds:
            lines.append(f"{part}: {found_in[part]} faults; {', '.join(sorted(kinds))}")
    return "\n".join([*lines, f"{found_in.total()} faults"])


def play(case: Case, rank: int) -> str:
    """What ranks must agree in; `FAULT ...` where a rule is broken."""
    module = importlib.import_module(f"lab.adversary.{case.part}")
    try:
        return module.play(case, rank)
    except Exception as error:  # whatever it is, and other ranks must be told of it
        return f"{_FAULT}{error}\n{traceback.format_exc()}"


def play_all(rank: int, world_size: int, cases: Sequence[Case]) -> tuple[list[str], dict[str, int]]:
    """Until the first fault, after which the ranks' states may be anything; with the number of
    times that each kind was drawn."""
    DRAWN.clear()
    said = []
    for case in cases:
        said.append(play(case, rank))
        if said[-1].startswith(_FAULT):
            # The others are told by the ends of this rank's processes.
            raise AssertionError(f"case {case.index}: {said[-1]}")
    return said, dict(DRAWN)


def find(
    part: str,
    seed: int,
    indices: Sequence[int],
    kind: str = "",
    *,
    alone: bool = True,
    end: float = math.inf,
) -> Iterator[Finding]:
    """The faults of these cases, each with the one case that shows it if there is one.

    Without `alone` that case is not looked for, nor are faults after the first of a world. No other
    world begins after `end`, a time of the monotonic clock.
    """
    preload(f"lab.adversary.{part}")  # once for all ranks, where no part has been played before
    by_world: defaultdict[World, list[Case]] = defaultdict(list)
    for index in indices:
        case = Case(part, seed, index, kind)
        by_world[world_of(case)].append(case)
    for world, cases in by_world.items():
        while cases and time.monotonic() < end:
            text = _fault(world, cases)
            if not text:
                break
            if not alone:
                yield Finding(cases, text)
                break
            yield (finding := _looked_at_again(world, cases, text))
            cases = cases[cases.index(finding.cases[-1]) + 1 :]


def _looked_at_again(world: World, cases: Sequence[Case], text: str) -> Finding:
    """The fault, with the one case that shows it by itself, or those that were played before it.

    The case that the ranks named is played again first.
    """
    named = {int(number) for number in _NAMED.findall(text)} & {case.index for case in cases}
    able = [case for case in cases if not named or case.index <= max(named)]
    said: list[str] = []
    for case in sorted(able, key=lambda case: case.index not in named):
        again = _fault(world, [case])
        if not again:
            said.append(f"case {case.index}, played again alone, does not show it")
        elif _kinds_of_fault(again) & _kinds_of_fault(text):
            said.append(f"case {case.index}, played again alone, shows the same fault")
            return Finding([case], again, tuple(said))
        else:
            said.append(f"case {case.index}, played again alone, shows another fault:\n{again}")
    return Finding(able, text, tuple(said))


def _kinds_of_fault(text: str) -> set[str]:
    """What is wrong, without the numbers in it, which time and chance may change."""
    reasons = _REASON.findall(text) or _OF_A_RANK.findall(text)
    return {re.sub(rf"(?<={_DIFFER}).*|[\d.]+", "#", reason) for reason in reasons}


def _fault(world: World, cases: Sequence[Case]) -> str:
    """What is wrong with these cases, one after the other on the same ranks, or nothing."""
    limit = _WORLD_SECONDS if world.hash_seed is None else _IMPORT_SECONDS
    limit += _CASE_SECONDS * len(cases)
    try:
        ranks = run_ranks(
            play_all,
            world.size,
            list(cases),
            timeout=limit,
            fresh=world.is_fresh,
            hash_seed=world.hash_seed,
        )
    except RankFailure as failure:
        return str(failure)
    counts.update(ranks[0][1])
    for case, *texts in zip(cases, *(said for said, _ in ranks), strict=True):
        if len(set(texts)) > 1:
            return f"case {case.index}: {_FAULT}{_DIFFER}: {texts}"
    return ""
