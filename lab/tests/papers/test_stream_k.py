# SPDX-License-Identifier: BSD-3-Clause
"""The index arithmetic of LeanAttention's Algorithm 4, checked for every size up to a bound."""

from collections import Counter
from itertools import pairwise, permutations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.papers.algorithms.lean import (
    SCHEDULES,
    AsPrinted,
    AsPrintedRoundedUp,
    Balanced,
    CorrectedLast,
    LastByShare,
    outcome,
    run,
)

SIZES = list(product(range(1, 8), range(1, 25), range(1, 13)))  # output tiles, iterations, CTAs


@pytest.mark.parametrize("schedule", [CorrectedLast, Balanced])
def test_corrected_arithmetic_is_right_at_every_size(schedule):
    assert Counter(outcome(schedule(*size)) for size in SIZES) == {"right": len(SIZES)}


@pytest.mark.parametrize("schedule", [AsPrinted, AsPrintedRoundedUp])
def test_printed_arithmetic_loses_tiles_and_hangs(schedule):
    outcomes = Counter(outcome(schedule(*size)) for size in SIZES)
    assert min(outcomes[kind] for kind in ("right", "wrong", "hangs")) > 100
    assert outcomes["right"] < len(SIZES) / 2


def test_last_cta_by_share_hangs_where_a_split_tile_ends_with_a_range():
    """It is right everywhere else, and loses nothing."""
    for size in SIZES:
        schedule = LastByShare(*size)
        share, ends = schedule.share, range(size[1], schedule.iters + 1, size[1])
        # A tile of several CTAs that ends with the range of one: its host waits for the next one.
        hangs = any(end % share == 0 and end - size[1] < end - share for end in ends)
        assert outcome(schedule) == ("hangs" if hangs else "right"), size


def test_figure_1_of_lean_attention():
    """2 heads of 5 LeanTiles over 5 SMs: SM 2 ends head 0 and begins head 1."""
    printed, corrected = AsPrintedRoundedUp(2, 5, 5), CorrectedLast(2, 5, 5)
    assert [corrected.start(g) for g in range(6)] == [0, 2, 4, 6, 8, 10]
    assert [corrected.last_cta(end) for end in (5, 10)] == [2, 4]
    assert [printed.last_cta(end) for end in (5, 10)] == [1, 2]
    outputs, waiting = run(
        printed, lambda tile, begin, end: [(tile, i) for i in range(begin, end)], lambda a, b: a + b
    )
    assert not waiting
    assert outputs == {0: [(0, 0), (0, 1), (0, 2), (0, 3)], 1: [(1, 0)]}, "both heads lose tiles"
    assert outcome(corrected) == "right"


@given(st.integers(1, 5), st.integers(1, 9), st.integers(1, 20))
def test_balanced_ranges_cover_the_line_and_differ_by_one(outputs, tile_iters, ctas):
    schedule = Balanced(outputs, tile_iters, ctas)
    starts = [schedule.start(g) for g in range(schedule.grid + 1)]
    sizes = [end - begin for begin, end in pairwise(starts)]
    assert starts[0] == 0 and starts[-1] == schedule.iters
    assert max(sizes) - min(sizes) <= 1 and min(sizes) >= 1
    for end in range(1, schedule.iters + 1):
        last = schedule.last_cta(end)
        assert starts[last] <= end - 1 < starts[last + 1], "it runs the iteration before the end"


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_order_of_the_ctas_changes_the_outcome(schedule):
    """All orders of up to four CTAs, which is why one order suffices for the other tests."""
    seen = set()
    for size in product(range(1, 4), range(1, 7), range(1, 5)):
        case = schedule(*size)
        outcomes = {outcome(case, order) for order in permutations(range(case.grid))}
        assert len(outcomes) == 1, size
        seen |= outcomes
    assert (seen == {"right"}) is (schedule in (CorrectedLast, Balanced))


def test_no_keys_leave_every_output_unwritten():
    outputs, waiting = run(Balanced(3, 0, 4), lambda *_: [], lambda a, b: a + b)
    assert outputs == {} and waiting == []
    assert outcome(Balanced(3, 0, 4)) == "right"
