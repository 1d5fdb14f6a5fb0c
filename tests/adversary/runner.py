# SPDX-License-Identifier: BSD-3-Clause
"""Plays cases on ranks, compares what ranks say, and finds the one line that repeats a fault."""

from __future__ import annotations

import importlib
import re
import traceback
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from distributed import RankFailure, preload, run_ranks

from .cases import Case

# What torch imports when it compiles, or is told to be deterministic: once for all ranks.
preload("torch._dynamo", "torch._inductor.config", "adversary.ranks", "adversary.threads")

PARTS = ("ops", "layouts", "ranks", "threads", "huggingface")
_CASE_SECONDS = 60.0
_FAULT = "FAULT "


@dataclass(frozen=True)
class Finding:
    cases: list[Case]
    text: str

    def __str__(self) -> str:
        first, last = self.cases[0], self.cases[-1]
        span = "" if first == last else f"-{last.index}"
        return f"python tests/adversary {first}{span}\n{self.text}"


def play(case: Case, rank: int) -> str:
    """What ranks must agree in; `FAULT ...` where a rule is broken."""
    module = importlib.import_module(f"adversary.{case.part}")
    try:
        return module.play(case, rank)
    except Exception:  # whatever a case raises is a finding, and other ranks must be told of it
        return _FAULT + traceback.format_exc()


def play_all(rank: int, world_size: int, cases: Sequence[Case]) -> list[str]:
    """Until the first fault, after which the ranks' states may be anything."""
    said = []
    for case in cases:
        said.append(play(case, rank))
        if said[-1].startswith(_FAULT):
            # The others are told by the ends of this rank's processes.
            raise AssertionError(f"case {case.index}: {said[-1]}")
    return said


def find(
    part: str, seed: int, indices: Sequence[int], kind: str = "", *, alone: bool = True
) -> Iterator[Finding]:
    """The faults of these cases, each with the one case that shows it if there is one.

    Without `alone` that case is not looked for, nor are faults after the first of a world.
    """
    module = importlib.import_module(f"adversary.{part}")
    by_world: defaultdict[int, list[Case]] = defaultdict(list)
    for index in indices:
        case = Case(part, seed, index, kind)
        by_world[module.world_size(case)].append(case)
    for world_size, cases in by_world.items():
        while cases:
            text = _fault(world_size, cases)
            if not text:
                break
            case, text_alone = _first_alone(world_size, cases, text) if alone else (None, "")
            if case is None:
                yield Finding(cases, text)
                break
            yield Finding([case], text_alone)
            cases = cases[cases.index(case) + 1 :]


def _first_alone(world_size: int, cases: Sequence[Case], text: str) -> tuple[Case | None, str]:
    """The case that breaks a rule by itself; that which the ranks named is tried first."""
    named = {int(number) for number in re.findall(r"\bcase (\d+): FAULT", text)}
    for case in sorted(cases, key=lambda case: case.index not in named):
        if said := _fault(world_size, [case]):
            return case, said
    return None, ""


def _fault(world_size: int, cases: Sequence[Case]) -> str:
    """What is wrong with these cases, one after the other on the same ranks, or nothing."""
    limit = _CASE_SECONDS + 2.0 * len(cases)
    try:
        said = run_ranks(play_all, world_size, list(cases), timeout=limit)
    except RankFailure as failure:
        return str(failure)
    for case, *texts in zip(cases, *said, strict=True):
        if len(set(texts)) > 1:
            return f"case {case.index}: FAULT the ranks differ: {texts}"
    return ""
