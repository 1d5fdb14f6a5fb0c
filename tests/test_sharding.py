# SPDX-License-Identifier: BSD-3-Clause
"""Shard layouts against a table of all slots: who owns slot s, and as which local slot."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tree_attention.sharding import BlockCyclic, Contiguous, ContiguousThenCyclic, ShardLayout

bounds = st.lists(st.integers(0, 12), min_size=1, max_size=6).map(
    lambda sizes: [sum(sizes[:i]) for i in range(len(sizes) + 1)]
)
given_shares = st.lists(st.integers(0, 6), min_size=1, max_size=7).filter(any)
weighted = st.builds(
    lambda shares, block: BlockCyclic(len(shares), block, shares), given_shares, st.integers(1, 9)
)
layouts = st.one_of(
    st.builds(BlockCyclic, st.integers(1, 7), st.integers(1, 9)),
    weighted,
    st.builds(Contiguous, bounds),
    st.builds(ContiguousThenCyclic, bounds, st.integers(1, 5)),
)


def shards_by_hand(layout: ShardLayout, num_slots: int) -> list[list[int]]:
    """The global slots of each rank, by dealing `num_slots` one after the other."""
    shards: list[list[int]] = [[] for _ in range(layout.world_size)]
    if isinstance(layout, BlockCyclic):
        shares = layout.shares or (1,) * layout.world_size
        owners = [r for r, n in enumerate(shares) for _ in range(n * layout.block)] * num_slots
    else:
        sizes = [b - a for a, b in pairwise(layout.bounds)]
        owners = [r for r, size in enumerate(sizes) for _ in range(size)]
        if isinstance(layout, ContiguousThenCyclic):
            turn = [r for r in range(layout.world_size) for _ in range(layout.block)]
            owners += turn * num_slots
    for slot, rank in enumerate(owners[:num_slots]):
        shards[rank].append(slot)
    return shards


def capacity(layout: ShardLayout) -> int:
    return layout.bounds[-1] if isinstance(layout, Contiguous) else 200


@given(layouts, st.integers(0, 200), st.integers(-3, 220), st.integers(-3, 220))
def test_layout_equals_table(layout, num_slots, begin, end):
    num_slots = min(num_slots, capacity(layout))
    shards = shards_by_hand(layout, num_slots)
    assert sum(map(len, shards)) == num_slots
    for rank, shard in enumerate(shards):
        assert layout.count(rank, num_slots) == len(shard)
        assert [layout.owner(slot) for slot in shard] == [rank] * len(shard)
        assert [layout.global_slots(rank, j) for j in range(len(shard))] == shard
        places = {slot: j for j, slot in enumerate(shard)}
        local_of = [layout.local_slots_of(rank, slot) for slot in range(num_slots)]
        assert local_of == [places.get(slot, -1) for slot in range(num_slots)]
        assert shard == sorted(shard), "local order follows global order"

        # The local range holds exactly the rank's slots of the global range, however it is cut.
        end = min(end, num_slots)
        expected = [j for j, slot in enumerate(shard) if begin <= slot < end]
        local_begin, local_end = layout.local_range(rank, begin, end)
        assert list(range(local_begin, local_end)) == expected
        local_slots = layout.local_slots(rank, begin, end)
        assert local_slots.dtype == torch.int64
        assert local_slots.tolist() == [shard[j] for j in expected]

        if not isinstance(layout, ContiguousThenCyclic):
            first, block, stride = layout.key_layout(rank)
            assert [first + j // block * stride + j % block for j in range(len(shard))] == shard


@pytest.mark.deep
@given(layouts, st.sampled_from([torch.int32, torch.int64]))
def test_tensors_and_integers_agree(layout, dtype):
    num_slots = capacity(layout)
    lengths = torch.arange(-3, num_slots + 1, dtype=dtype)
    slots = torch.arange(num_slots, dtype=dtype)
    assert layout.owner(slots).tolist() == [layout.owner(slot) for slot in range(num_slots)]
    assert layout.owner(slots[:0]).numel() == 0
    for rank in range(layout.world_size):
        local_of = layout.local_slots_of(rank, slots)
        assert local_of.dtype == torch.int64
        assert local_of.tolist() == [layout.local_slots_of(rank, s) for s in range(num_slots)]
        counts = layout.count(rank, lengths)
        assert counts.dtype == torch.int64
        assert counts.tolist() == [layout.count(rank, length) for length in lengths.tolist()]
        pairs = lengths.unfold(0, 2, 1)  # [n, 2]: ranges of one slot, also outside the cache
        begins, ends = layout.local_range(rank, pairs[:, 0], pairs[:, 1])
        expected = [layout.local_range(rank, begin, end) for begin, end in pairs.tolist()]
        assert list(zip(begins.tolist(), ends.tolist(), strict=True)) == expected
        local = torch.arange(layout.count(rank, num_slots), dtype=dtype)
        assert layout.global_slots(rank, local).tolist() == [
            layout.global_slots(rank, j) for j in range(len(local))
        ]


@given(given_shares, st.integers(1, 9), st.integers(1, 4), st.integers(0, 300), st.integers(0, 99))
def test_shares_are_what_ranks_hold(given, block, factor, length, begin):
    layout = BlockCyclic(len(given), block, [factor * share for share in given])
    assert layout == BlockCyclic(len(given), block, given)
    assert (layout.shares is None) == (len({*given}) == 1)
    total, counts = sum(given), [layout.count(rank, length) for rank in range(len(given))]
    assert sum(counts) == length
    cycle = block * sum(layout.shares or (1,) * len(given))
    for rank, (share, count) in enumerate(zip(given, counts, strict=True)):
        if share == 0:
            assert count == 0
        if length % cycle == 0:
            assert count * total == length * share
        # A run of slots, wherever it begins, gives no rank more than its part and a run.
        held = layout.count(rank, begin + length) - layout.count(rank, begin)
        assert abs(held - length * share / total) <= cycle * share / total


@given(st.integers(1, 7), st.integers(1, 9), st.integers(0, 500))
def test_equal_shares_are_the_even_layout(world_size, block, length):
    layout = BlockCyclic(world_size, block, shares=[5] * world_size)
    even = BlockCyclic(world_size, block)
    assert layout == even and layout.shares is None and repr(layout) == repr(even)
    cycle = world_size * block
    for rank in range(world_size):
        # The arithmetic of releases without shares.
        first = rank * block
        expected = length // cycle * block + max(0, min(length % cycle - first, block))
        assert layout.count(rank, length) == expected
        assert layout.key_layout(rank) == (first, block, cycle)
    assert layout.owner(length) == length // block % world_size


@pytest.mark.parametrize(
    "layout",
    [
        BlockCyclic(2, 3),
        BlockCyclic(3, 2, (0, 1, 3)),
        Contiguous((0, 5, 5, 9)),
        ContiguousThenCyclic((0, 5, 9), 2),
    ],
    ids=lambda layout: type(layout).__name__,
)
def test_local_slots_of_is_no_question_to_the_host(layout):
    torch._dynamo.reset()
    graph = torch.compile(layout.local_slots_of, fullgraph=True, backend="eager")
    slots = torch.arange(-2, 12)
    local = graph(1, slots)
    assert torch.equal(local, layout.local_slots_of(1, slots))
    held = layout.local_slots(1, 0, 12)
    assert torch.equal(slots[local >= 0], held)
    assert torch.equal(local[local >= 0], torch.arange(len(held)))


@pytest.mark.parametrize("as_tensor", [False, True], ids=["integers", "int32 tensors"])
def test_slots_beyond_32_bits_are_exact(as_tensor):
    """A rank's own slots fit 32 bits long after the global ones do not."""
    layout, length = BlockCyclic(8, 64), 2**31 - 1
    local = torch.tensor(length, dtype=torch.int32) if as_tensor else length
    assert layout.global_slots(7, local) == 7 * 64 + length // 64 * 512 + length % 64
    far = Contiguous([0, 2**33, 2**33 + 5])
    assert far.count(1, local) == 0
    assert far.global_slots(1, 4) == 2**33 + 4
    assert ContiguousThenCyclic(far.bounds, 1).count(0, 2**33 + 5 + 7) == 2**33 + 4


def test_known_layouts():
    layout = BlockCyclic(3, 2)  # 0 0 1 1 2 2 0 0 1 1 2 2
    assert layout.owner(torch.arange(8)).tolist() == [0, 0, 1, 1, 2, 2, 0, 0]
    assert layout.local_slots(1, 0, 12).tolist() == [2, 3, 8, 9]
    assert layout.local_range(1, 3, 9) == (1, 3)
    assert layout.key_layout(1) == (2, 2, 6)
    assert BlockCyclic(2).block == 64
    weighted = BlockCyclic(4, 2, [0, 6, 0, 2])  # 1 1 1 1 1 1 3 3 1 1 1 1 1 1 3 3
    assert weighted == BlockCyclic(4, 2, (0, 3, 0, 1)) and weighted != BlockCyclic(4, 2)
    assert str(weighted) == "BlockCyclic(world_size=4, block=2, shares=(0, 3, 0, 1))"
    assert weighted.owner(torch.arange(10)).tolist() == [1] * 6 + [3] * 2 + [1] * 2
    assert weighted.local_slots(3, 0, 17).tolist() == [6, 7, 14, 15]
    assert [weighted.key_layout(r) for r in (1, 2, 3)] == [(0, 6, 8), (6, 2, 8), (6, 2, 8)]
    assert weighted.count(1, 2**62) == 3 * 2**60  # `deterministic` asks for it
    assert weighted.count(1, torch.tensor(2**62)) == 3 * 2**60
    uneven = Contiguous([0, 5, 5, 6])
    assert [uneven.count(r, 100) for r in range(3)] == [5, 0, 1]
    assert uneven.key_layout(2) == (5, 1, 1)
    after_prefill = ContiguousThenCyclic([0, 3, 4], 2)
    assert after_prefill.local_slots(0, 0, 10).tolist() == [0, 1, 2, 4, 5, 8, 9]
    assert after_prefill.local_slots(1, 0, 10).tolist() == [3, 6, 7]
    assert BlockCyclic(3, 2) == layout and hash(BlockCyclic(3, 2)) == hash(layout)


_SHARES = (
    "BlockCyclic: shares must be an integer from 0 to 1,024 for each of 2 ranks, and not all 0, "
    "got "
)


@pytest.mark.parametrize(
    ("shares", "error"),
    [
        ((), ValueError),
        ((1,), ValueError),
        ((1, 2, 3), ValueError),
        ((-1, 2), ValueError),
        ((0, 0), ValueError),
        ((1, 1025), ValueError),
        ((1, 2**70), ValueError),
        ((1.0, 2.0), TypeError),
        ((True, False), TypeError),
        ((float("nan"), 1), TypeError),
        ((None, 1), TypeError),
        ([[1], [2]], TypeError),
        ("31", TypeError),
        ("auto", TypeError),
        (31, TypeError),
        ({3: 0, 1: 1}, TypeError),
        (torch.tensor([0.5, 0.5]), TypeError),
    ],
)
def test_bad_shares_are_refused(shares, error):
    with pytest.raises(error) as caught:
        BlockCyclic(2, 64, shares)
    assert str(caught.value).startswith(_SHARES)
    assert repr(shares)[:30] in str(caught.value)


@pytest.mark.parametrize("kind", [list, tuple, torch.tensor, np.array])
def test_shares_are_integers_of_any_library(kind):
    layout = BlockCyclic(2, 64, kind([6, 2]))
    assert layout.shares == (3, 1) and {*map(type, layout.shares)} == {int}
    assert hash(layout) == hash(BlockCyclic(2, 64, (3, 1)))


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: BlockCyclic(0), "BlockCyclic: world_size must be an integer of at least 1, got 0"),
        (lambda: BlockCyclic(2, 0), "BlockCyclic: block must be an integer of at least 1, got 0"),
        (
            lambda: Contiguous([0, 5, 4]),
            "Contiguous: bounds must be world_size + 1 non-decreasing integers from 0, "
            "got [0, 5, 4]",
        ),
        (
            lambda: Contiguous([1, 5]),
            "Contiguous: bounds must be world_size + 1 non-decreasing integers from 0, got [1, 5]",
        ),
        (
            lambda: ContiguousThenCyclic([0]),
            "ContiguousThenCyclic: bounds must be world_size + 1 non-decreasing integers from 0, "
            "got [0]",
        ),
        (
            lambda: ContiguousThenCyclic([0, 4], -1),
            "ContiguousThenCyclic: block must be an integer of at least 1, got -1",
        ),
        (lambda: BlockCyclic(2).count(2, 5), "BlockCyclic: rank must be in [0, 2), got 2"),
        (lambda: Contiguous([0, 4]).count(-1, 5), "Contiguous: rank must be in [0, 1), got -1"),
        (
            lambda: ContiguousThenCyclic([0, 4]).key_layout(0),
            "ContiguousThenCyclic: its local slots have no single key_layout; "
            "call lean_decode for the contiguous and for the cyclic part, and merge_states of both",
        ),
        (
            lambda: Contiguous([0, 4]).owner(4),
            "Contiguous: slots must be below bounds[-1] = 4, got 4",
        ),
        (
            lambda: Contiguous([0, 4]).owner(torch.tensor([1, 7])),
            "Contiguous: slots must be below bounds[-1] = 4, got 7",
        ),
        (lambda: BlockCyclic(2).owner(-1), "BlockCyclic: slots must be at least 0, got -1"),
        (
            lambda: ContiguousThenCyclic([0, 4]).owner(torch.tensor([3, -2])),
            "ContiguousThenCyclic: slots must be at least 0, got -2",
        ),
        (lambda: Contiguous([0, 4]).owner(-1), "Contiguous: slots must be at least 0, got -1"),
    ],
)
def test_errors_name_class_argument_and_value(make, message):
    with pytest.raises(ValueError) as error:
        make()
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: BlockCyclic(2.5),
            "BlockCyclic: world_size must be an integer of at least 1, got 2.5",
        ),
        (lambda: Contiguous(3), "Contiguous: bounds must be integers, got 3"),
        (lambda: Contiguous([0, 2.7]), "Contiguous: bounds must be an integer, got 2.7"),
        (
            lambda: ContiguousThenCyclic([0, 4], 1.5),
            "ContiguousThenCyclic: block must be an integer of at least 1, got 1.5",
        ),
        (lambda: BlockCyclic(2).count(0, 2.5), "BlockCyclic: length must be an integer, got 2.5"),
        (lambda: BlockCyclic(2).count(0.0, 2), "BlockCyclic: rank must be an integer, got 0.0"),
        (
            lambda: BlockCyclic(2).count(0, torch.tensor([2.0])),
            "BlockCyclic: length must be integers, got torch.float32",
        ),
        (lambda: Contiguous([0, 4]).owner([1]), "Contiguous: slots must be an integer, got [1]"),
        (
            lambda: BlockCyclic(2).local_slots(0, 0, 9.5),
            "BlockCyclic: end must be an integer, got 9.5",
        ),
        (
            lambda: Contiguous([0, 4]).global_slots(0, 1.5),
            "Contiguous: local_slots must be an integer, got 1.5",
        ),
    ],
)
def test_fractions_are_refused_not_truncated(make, message):
    with pytest.raises(TypeError) as error:
        make()
    assert str(error.value) == message
