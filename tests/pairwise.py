# SPDX-License-Identifier: BSD-3-Clause
"""Cases of a table of which every value, or every two values, meet at least once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable
from itertools import combinations, groupby
from typing import Any, TypeVar

import pytest

Case = TypeVar("Case", bound=tuple[Any, ...])
Parts = set[Hashable]


def by_tier(
    quick: Iterable[Case], deep: Iterable[Case], in_turn: Collection[int] = ()
) -> list[Any]:
    """Return lists of cases as parameters of a test: in the quick tier each value of `quick`, in
    the deep tier the pairs of `deep` that are missing. Each list has one value in the last place,
    as a world, whose processes its cases share."""
    met = each_value(quick)
    found = []
    for cases, marks in ((met, ()), (each_pair(deep, met, in_turn), pytest.mark.deep)):
        for last, group in groupby(sorted(cases, key=lambda x: str(x[-1])), lambda x: x[-1]):
            found.append(pytest.param([*group], marks=marks, id=str(last)))
    return found


def each_value(cases: Iterable[Case]) -> list[Case]:
    """Return cases, by a fixed rule, that have every value of every position."""
    return _cover(cases, lambda case: {*enumerate(case)}, ())


def each_pair(
    cases: Iterable[Case], have: Iterable[Case] = (), in_turn: Collection[int] = ()
) -> list[Case]:
    """Return cases, by a fixed rule, with which `have` has every two values that `cases` have at
    two positions. A value at a position of `in_turn` need not meet every other one."""

    def parts(case: Case) -> Parts:
        values = [*enumerate(case)]
        pairs = combinations((x for x in values if x[0] not in in_turn), 2)
        return {*values, *pairs}

    return _cover(cases, parts, have)


def _cover(
    cases: Iterable[Case], parts_of: Callable[[Case], Parts], have: Iterable[Case]
) -> list[Case]:
    """Take again and again the case that has most of what is missing: of such the one whose values
    were taken least often, of these the first."""
    have = [*have]
    missing = {case: parts_of(case) for case in cases}
    met = Parts().union(*map(parts_of, have))
    taken = Counter(x for case in have for x in enumerate(case))
    found = list[Case]()
    while True:
        missing = {case: parts - met for case, parts in missing.items() if parts - met}
        if not missing:
            return found
        best = max(missing, key=lambda x: (len(missing[x]), -sum(taken[y] for y in enumerate(x))))
        met |= missing[best]
        taken.update(enumerate(best))
        found.append(best)
