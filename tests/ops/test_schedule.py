# SPDX-License-Identifier: BSD-3-Clause
"""lean_schedule: every tile once, equal loads, and who begins and finishes an output."""

import math
from itertools import groupby, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import assert_same_bits
from tree_attention import lean_decode, lean_schedule, merge_states


def schedule(num_tiles: list[int], num_workers: int) -> list[list[int]]:
    table = lean_schedule(torch.tensor(num_tiles, dtype=torch.int32), num_workers)
    assert table.dtype == torch.int64 and table.shape == (len(table), 4)
    return table.tolist()


def test_golden_example_of_leanattention_figure_1():
    """Two heads of five tiles on five workers: hosts 0 and 2, finishing workers 2 and 4."""
    assert schedule([5, 5], 5) == [
        [0, 0, 0, 2],
        [1, 0, 2, 4],
        [2, 0, 4, 5],
        [2, 1, 0, 1],
        [3, 1, 1, 3],
        [4, 1, 3, 5],
    ]


@pytest.mark.parametrize(
    "num_tiles, num_workers, expected",
    [
        ([], 3, []),
        ([0, 0], 3, []),
        ([1], 1, [[0, 0, 0, 1]]),
        ([3, 3], 2, [[0, 0, 0, 3], [1, 1, 0, 3]]),  # one output each: FlashAttention-2
        ([4], 2, [[0, 0, 0, 2], [1, 0, 2, 4]]),  # an equal split: FlashDecoding
        ([0, 2, 0, 1], 1, [[0, 1, 0, 2], [0, 3, 0, 1]]),
        ([2], 4, [[1, 0, 0, 1], [3, 0, 1, 2]]),  # more workers than tiles
        ([2], 2**61, [[2**60 - 1, 0, 0, 1], [2**61 - 1, 0, 1, 2]]),  # in time for tiles only
    ],
)
def test_small_schedules(num_tiles, num_workers, expected):
    assert schedule(num_tiles, num_workers) == expected


def test_line_beyond_32_bits():
    large = 2**31 - 1
    table = schedule([large] * 5, 3)
    assert sum(end - begin for _, _, begin, end in table) == 5 * large
    assert table[0][2:] == [0, large] and table[-1][3] == large
    loads = [sum(r[3] - r[2] for r in rows) for _, rows in groupby(table, key=lambda r: r[0])]
    assert max(loads) - min(loads) <= 1


@settings(max_examples=300)
@given(st.lists(st.integers(0, 20), max_size=12), st.integers(1, 40))
def test_line_is_cut_into_equal_runs(num_tiles, num_workers):
    table, total = schedule(num_tiles, num_workers), sum(num_tiles)
    tiles = [(output, t) for output, count in enumerate(num_tiles) for t in range(count)]
    run = [(output, t) for _, output, begin, end in table for t in range(begin, end)]
    assert run == tiles, "each tile once, in line order"
    assert all(begin < end for _, _, begin, end in table)
    workers = [worker for worker, *_ in table]
    assert workers == sorted(workers) and set(workers) <= set(range(num_workers))

    loads = [sum(r[3] - r[2] for r in table if r[0] == w) for w in range(num_workers)]
    assert max(loads) == math.ceil(total / num_workers), "the makespan is optimal"
    assert max(loads) - min(loads) <= 1


@settings(max_examples=300)
@given(st.lists(st.integers(0, 20), max_size=12), st.integers(1, 40))
def test_contributors_of_an_output(num_tiles, num_workers):
    """Those that have tiles are known by arithmetic alone: the owner of the first tile hosts, that
    of the last one finishes. The printed Algorithm 4 divides the exclusive end and waits for ever
    when a split output ends where a worker does, as in its own Figure 1."""
    table, total = schedule(num_tiles, num_workers), sum(num_tiles)
    line_begin = 0
    for output, count in enumerate(num_tiles):
        segments = [row for row in table if row[1] == output]
        if count == 0:
            assert not segments
            continue
        workers = [row[0] for row in segments]
        host = ((line_begin + 1) * num_workers - 1) // total
        line_begin += count
        finishing = (line_begin * num_workers - 1) // total
        assert (workers[0], workers[-1]) == (host, finishing)
        assert len(set(workers)) == len(workers), "one segment of an output for a worker"
        assert all(a[3] == b[2] for a, b in pairwise(segments)), "segments adjoin"
        assert (segments[0][2], segments[-1][3]) == (0, count)
        if num_workers <= total:
            assert workers == list(range(host, finishing + 1)), "contributors are consecutive"


@settings(max_examples=300)
@given(st.lists(st.integers(0, 20), max_size=12), st.integers(1, 40))
def test_a_worker_shares_at_most_its_first_and_last_output(num_tiles, num_workers):
    """So two partial states for each worker are workspace enough."""
    for _, rows in groupby(schedule(num_tiles, num_workers), key=lambda row: row[0]):
        segments = list(rows)
        for _, output, begin, end in segments[1:-1]:
            assert (begin, end) == (0, num_tiles[output])
        for _, _, begin, _ in segments[1:]:
            assert begin == 0
        for _, output, _, end in segments[:-1]:
            assert end == num_tiles[output]


def test_leanattention_beats_any_fixed_split():
    """Its makespan, in tiles, is at most that of FlashAttention-2 and of every split count."""
    for num_outputs in range(1, 12):
        for num_tiles in (1, 2, 5, 8, 13):
            for num_workers in range(1, 20):
                total = num_outputs * num_tiles
                lean = math.ceil(total / num_workers)
                for split in range(1, num_tiles + 1):
                    waves = math.ceil(num_outputs * split / num_workers)
                    assert lean <= waves * math.ceil(num_tiles / split)


def test_strided_counts():
    counts = torch.tensor([5, 9, 5, 9], dtype=torch.int32)[::2]
    assert lean_schedule(counts, 5).tolist() == schedule([5, 5], 5)


@pytest.mark.deep
@settings(max_examples=60)
@given(
    st.lists(st.integers(0, 300) | st.integers(30_000, 50_000), min_size=1, max_size=3),
    st.integers(1, 2),
    st.sampled_from([1, 2, 3, 17, 37, 100, 700]),
)
def test_split_outputs_have_the_bits_of_one_merge(lengths, heads_kv, num_workers):
    """The schedule of the table is the kernel's, and however many workers share an output, and
    arrive in whatever order, its bits are those of merging the states of their tiles."""
    tile, capacity = 64, max(lengths)
    q = torch.randn(len(lengths), heads_kv, 1, 8)
    k, v = torch.randn(2, len(lengths), heads_kv, capacity, 8)
    ranges = torch.tensor([[[0, length]] for length in lengths], dtype=torch.int32)
    o, lse = lean_decode(q, k, v, ranges, num_workers=num_workers)

    num_tiles = [math.ceil(length / tile) for length in lengths for _ in range(heads_kv)]
    # Like the kernels, never more workers than tiles.
    table = schedule(num_tiles, min(num_workers, max(1, sum(num_tiles))))
    for output in range(len(num_tiles)):
        b, h = divmod(output, heads_kv)
        inputs = q[b : b + 1, h : h + 1], k[b : b + 1, h : h + 1], v[b : b + 1, h : h + 1]
        parts = []
        for begin, end in [row[2:] for row in table if row[1] == output] or [(0, 0)]:
            keys = [[[begin * tile, min(end * tile, lengths[b])]]]
            parts.append(lean_decode(*inputs, torch.tensor(keys, dtype=torch.int32), num_workers=1))
        merged = merge_states(*map(torch.stack, zip(*parts, strict=True)))
        assert_same_bits(merged, (o[b : b + 1, h : h + 1], lse[b : b + 1, h : h + 1]))
