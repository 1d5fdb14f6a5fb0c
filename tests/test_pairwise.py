# SPDX-License-Identifier: BSD-3-Clause
"""The mistake these tests are for: two values that tests of tables never try together."""

from itertools import combinations, product

from hypothesis import given
from hypothesis import strategies as st

from pairwise import by_tier, each_pair, each_value


def _pairs(cases, places):
    return {(i, x[i], j, x[j]) for x in cases for i, j in combinations(places, 2)}


@given(st.lists(st.integers(1, 5), min_size=2, max_size=4), st.data())
def test_every_two_values_meet_and_few_cases_are_taken(sizes, data):
    all_cases = [*product(*map(range, sizes))]
    # As in tables, not every case exists.
    cases = data.draw(st.lists(st.sampled_from(all_cases), min_size=1, unique=True))
    places = range(len(sizes))
    once = each_value(cases)
    assert {*once} <= {*cases}
    assert {y for x in once for y in enumerate(x)} == {y for x in cases for y in enumerate(x)}
    twice = each_pair(cases, once)
    assert {*twice} <= {*cases} - {*once}
    assert _pairs(once + twice, places) == _pairs(cases, places)
    first, *others = places
    in_turn = each_pair(cases, in_turn=[first])
    assert {x[first] for x in in_turn} == {x[first] for x in cases}
    assert _pairs(in_turn, others) == _pairs(cases, others)
    assert len(each_pair(all_cases)) <= 2 * max(a * b for a, b in combinations(sizes, 2))


def test_values_in_turn_meet_the_others_alike_often():
    cases = each_pair(product(range(60), range(3), (2,)), in_turn=[0])
    assert len(cases) == 60
    assert [sum(x[1] == way for x in cases) for way in range(3)] == [20, 20, 20]


def test_tiers_are_lists_by_the_last_value():
    quick = product("ab", "cd", [2])
    deep = product("ab", "cd", [(3, 1), 4])
    parameters = by_tier(quick, deep)
    assert [x.id for x in parameters] == ["2", "(3, 1)", "4"]
    assert [len(x.marks) for x in parameters] == [0, 1, 1]
    lists = [x.values[0] for x in parameters]
    assert [len(x) for x in lists] == [2, 2, 2]
    assert _pairs([x for one in lists for x in one], range(2)) == _pairs(
        product("ab", "cd"), range(2)
    )
