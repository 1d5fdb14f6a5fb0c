# SPDX-License-Identifier: BSD-3-Clause
"""Patterns of sparse attention: which keys each query sees, and the same attention on shards."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers import Problem, make_problem
from tree_attention import merge_states, patterns
from tree_attention.sharding import BlockCyclic, Contiguous


def seen(ranges, length):
    """The sets of keys that each query of one sequence sees."""
    return [
        {j for begin, end in query for j in range(max(begin, 0), min(end, length))}
        for query in ranges[0].tolist()
    ]


SLOTS = torch.arange(40)[None]
slots = st.lists(st.integers(0, 10_000), min_size=1, max_size=4).map(lambda x: torch.tensor([x]))


def test_first_and_window():
    ranges = torch.cat([patterns.first(SLOTS, 4), patterns.window(SLOTS, 8)], dim=2)
    for i, keys in enumerate(seen(ranges, 40)):
        assert keys == {j for j in range(i + 1) if j < 4 or j > i - 8}


def test_global_tokens():
    ranges = patterns.global_tokens(SLOTS, [(0, 2), (10, 12)])
    for i, keys in enumerate(seen(ranges, 40)):
        everywhere = {0, 1, 10, 11}
        assert keys == {j for j in range(i + 1) if j in everywhere or i in everywhere}


@pytest.mark.parametrize("block", [1, 3])
def test_dilated(block):
    for i, keys in enumerate(seen(patterns.dilated(SLOTS, 4, dilation=5, block=block), 40)):
        assert keys == {j for j in range(i + 1) if (i - j) % 5 < block and (i - j) // 5 < 4}


def test_random_blocks():
    slots = torch.arange(4096)[None]
    keys = seen(patterns.random_blocks(slots, 3, block=16, seed=1), 4096)
    for i in range(0, 4096, 16):
        assert {j // 16 for j in keys[i]} == {j // 16 for j in keys[i + 15]}, "one draw a block"
        assert len({j // 16 for j in keys[i]}) <= 3 and max(keys[i]) <= i
    drawn = torch.tensor([j // 16 / (i // 16 + 1) for i in range(1024, 4096) for j in keys[i]])
    assert abs(drawn.mean() - 0.5) < 0.03, "blocks are drawn evenly"
    other = patterns.random_blocks(slots, 3, block=16, seed=2)
    assert not torch.equal(other, patterns.random_blocks(slots, 3, block=16, seed=1))


@given(slots, st.integers(1, 3000), st.integers(1, 20), st.integers(1, 300))
def test_no_query_sees_what_follows_it(slots, size, count, block):
    for ranges in (
        patterns.window(slots, size),
        patterns.first(slots, size),
        patterns.global_tokens(slots, [(size, size + block)]),
        patterns.dilated(slots, count, dilation=size, block=block),
        patterns.random_blocks(slots, count, block=block, seed=size),
    ):
        assert ranges.dtype == torch.int32 and ranges.shape[:2] == slots.shape
        assert (ranges[..., 1] <= slots[..., None] + 1).all() and (ranges >= 0).all()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32])
def test_sizes_that_the_dtype_of_the_slots_cannot_hold(dtype):
    slots = torch.tensor([[3, 100, 127]])
    for pattern in (
        lambda slots: patterns.window(slots, 10),
        lambda slots: patterns.first(slots, 2**33),
        lambda slots: patterns.global_tokens(slots, [(2**32, 2**32 + 5)]),
        lambda slots: patterns.dilated(slots, 3, dilation=2**31),
    ):
        assert torch.equal(pattern(slots.to(dtype)), pattern(slots))


def test_ranges_behind_every_slot_are_empty():
    """Though int32 would have their ends wrap around to slots that the query may see."""
    ranges = patterns.global_tokens(SLOTS, [(2**32, 2**32 + 5)])
    assert not any(seen(ranges, 40))


def test_a_query_without_a_slot_sees_nothing():
    slots = torch.tensor([[-1, -1]])
    for ranges in (
        patterns.window(slots, 4),
        patterns.first(slots, 4),
        patterns.global_tokens(slots, [(0, 4)]),
        patterns.dilated(slots, 2, dilation=3),
        patterns.random_blocks(slots, 2, block=4, seed=0),
    ):
        assert not any(seen(ranges, 40))


def big_bird(slots):
    blocks = patterns.random_blocks(slots, 3, block=16, seed=7)
    return torch.cat([patterns.first(slots, 16), patterns.window(slots, 48), blocks], dim=2)


def test_a_query_sees_the_same_when_it_decodes_and_in_a_prompt():
    slots = torch.arange(100)[None]
    alone = torch.cat([big_bird(slots[:, i : i + 1]) for i in range(100)], dim=1)
    assert torch.equal(alone, big_bird(slots))


@pytest.mark.parametrize("layout", [BlockCyclic(3, 16), Contiguous([0, 10, 10, 200])])
def test_shards_see_their_part(layout, device):
    """Their states merge to the state over the whole cache."""
    whole = make_problem(batch=2, seqlen_q=5, seqlen_k=200)
    whole.key_ranges = big_bird(torch.randint(200, (2, 5)))
    parts = []
    for rank in range(layout.world_size):
        shard = whole.shard(layout, rank)
        local = patterns.local(whole.key_ranges, layout, rank)
        parts.append(Problem(shard.q, shard.k, shard.v, local).to(device).run())
    whole.check(*merge_states(*(torch.stack(x) for x in zip(*parts, strict=True))))


def test_patterns_are_made_on_the_device_of_the_slots(device):
    slots = torch.arange(90, 95, device=device)[None]
    problem = make_problem(batch=1, seqlen_q=5, seqlen_k=95).to(device)
    problem.key_ranges = big_bird(slots)
    assert problem.key_ranges.device == slots.device
    problem.run_and_check()


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: patterns.window(SLOTS, 0), "window: size must be at least 1, got 0"),
        (lambda: patterns.first(SLOTS, -1), "first: count must be at least 1, got -1"),
        (lambda: patterns.global_tokens(SLOTS, []), "number of ranges must be at least 1"),
        (lambda: patterns.dilated(SLOTS, 3, dilation=0), "dilated: dilation must be at least 1"),
        (lambda: patterns.random_blocks(SLOTS, 1, block=0, seed=0), "block must be at least 1"),
        (lambda: patterns.random_blocks(SLOTS, 1, block=1, seed=-1), r"seed must be in \[0, 2"),
        (lambda: patterns.window(SLOTS[0], 4), r"integers of shape \[batch, seqlen_q\]"),
        (lambda: patterns.window(SLOTS.float(), 4), r"got torch.float32 of shape \[1, 40\]"),
    ],
)  # fmt: skip
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()
