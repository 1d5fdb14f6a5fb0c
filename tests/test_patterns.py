# SPDX-License-Identifier: BSD-3-Clause
"""Patterns of sparse attention: which keys each query sees, and the same attention on shards."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers import Problem, make_problem, paginate
from tree_attention import lean_decode, merge_states, patterns
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


def test_block():
    for i, keys in enumerate(seen(patterns.block(SLOTS, 7), 40)):
        assert keys == {j for j in range(i + 1) if j // 7 == i // 7}


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
        patterns.block(slots, size),
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
        patterns.block(slots, 4),
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


HEADS = 3


def of_heads(slots):
    """A pattern for each kv head, with one, seven and four ranges."""
    far = patterns.dilated(slots, 7, dilation=13)
    return [
        patterns.window(slots, 20),
        far,
        torch.cat([far[:, :, :3], patterns.block(slots, 9)], 2),
    ]


def by_head(problem, ranges):
    """o and lse in the shape of the problem, of one call with ranges for each head."""
    o, lse = lean_decode(*patterns.by_head(problem.q, problem.k, problem.v, ranges))
    return o.view(*problem.q.shape[:3], -1), lse.view(problem.q.shape[:3])


def one_head(problem, head, ranges):
    """The problem of one kv head and its group of query heads."""
    group = problem.q.shape[1] // problem.k.shape[1]
    heads = slice(head * group, (head + 1) * group)
    one = slice(head, head + 1)
    return heads, Problem(problem.q[:, heads], problem.k[:, one], problem.v[:, one], ranges)


def test_heads_see_ranges_of_their_own(device):
    slots = torch.randint(200, (2, 5))
    problem = make_problem(batch=2, num_heads_kv=HEADS, group_size=2, seqlen_q=5, seqlen_k=200)
    ranges = of_heads(slots)
    assert len({x.shape[2] for x in ranges}) == 3
    problem = problem.to(device)
    ranges = [x.to(device) for x in ranges]
    o, lse = by_head(problem, ranges)
    for head in range(HEADS):
        heads, alone = one_head(problem, head, ranges[head])
        alone.check(o[:, heads], lse[:, heads])


def test_heads_with_ranges_of_their_own_on_shards():
    layout = BlockCyclic(3, 16)
    whole = make_problem(batch=2, num_heads_kv=HEADS, seqlen_q=5, seqlen_k=200)
    ranges = of_heads(torch.randint(200, (2, 5)))
    parts = []
    for rank in range(layout.world_size):
        shard = whole.shard(layout, rank)
        parts.append(by_head(shard, [patterns.local(x, layout, rank) for x in ranges]))
    o, lse = merge_states(*(torch.stack(x) for x in zip(*parts, strict=True)))
    for head in range(HEADS):
        heads, alone = one_head(whole, head, ranges[head])
        alone.check(o[:, heads], lse[:, heads])


def test_heads_of_a_cache_are_not_copied():
    cache = torch.zeros(2, HEADS, 300, 8)
    slots = torch.randint(200, (2, 5))
    _, k, v, _ = patterns.by_head(
        torch.zeros(2, HEADS, 5, 8), cache[:, :, :200], cache[:, :, 50:200], of_heads(slots)
    )
    assert k.data_ptr() == cache.data_ptr() and v.data_ptr() == cache[:, :, 50:].data_ptr()


def test_patterns_are_made_on_the_device_of_the_slots(device):
    slots = torch.arange(90, 95, device=device)[None]
    problem = make_problem(batch=1, seqlen_q=5, seqlen_k=95).to(device)
    problem.key_ranges = big_bird(slots)
    assert problem.key_ranges.device == slots.device
    problem.run_and_check()


PAGE = 16


def pages_of_big_bird(slots):
    """The pages that the last query of each sequence sees."""
    pages = slots[:, -1:] // PAGE
    blocks = patterns.random_blocks(pages, 3, block=1, seed=7)
    return torch.cat([patterns.first(pages, 1), patterns.window(pages, 2), blocks], dim=2)


def ranges_of_pages(page_ranges, slots):
    """The ranges of slots that page lists stand for, `[batch, seqlen_q, num_ranges, 2]`."""
    ranges = page_ranges * PAGE
    return torch.minimum(ranges, (slots + 1)[..., None, None]).int()


def with_page_list(shard, page_ranges, lengths, **options):
    """The problem over pages in random order, of which it lists those that are seen."""
    k, v, table = paginate(shard.k, shard.v, PAGE, **options)
    listed, key_ranges = patterns.page_lists(page_ranges, lengths, table, PAGE)
    assert listed.shape == table.shape and listed.dtype == torch.int32
    return Problem(shard.q, k, v, key_ranges, {"page_table": listed})


SLOTS_OF_PAGES = torch.stack([torch.arange(150, 155), torch.arange(95, 100), torch.arange(0, 5)])


@pytest.mark.parametrize("per_head", [False, True])
def test_page_lists_see_what_ranges_see(per_head, device):
    """Of queries in one page and on both sides of its end, with NaN in all other keys."""
    whole = make_problem(batch=3, seqlen_q=5, seqlen_k=170)
    page_ranges = pages_of_big_bird(SLOTS_OF_PAGES)
    whole.key_ranges = ranges_of_pages(page_ranges, SLOTS_OF_PAGES)
    j = torch.arange(170)
    is_seen = ((whole.key_ranges[..., :1] <= j) & (j < whole.key_ranges[..., 1:])).any(2).any(1)
    assert 0 < is_seen[0].sum() < 100, "some pages are left out"
    for x in (whole.k, whole.v):
        x.masked_fill_(~is_seen[:, None, :, None], torch.nan)
    listed = with_page_list(whole, page_ranges, SLOTS_OF_PAGES + 1, per_head=per_head)
    whole.check(*listed.to(device).run())


@pytest.mark.parametrize(
    "layout, pages",
    [
        (BlockCyclic(3, 2 * PAGE), BlockCyclic(3, 2)),
        (Contiguous((0, 2 * PAGE, 2 * PAGE, 170)), Contiguous((0, 2, 2, 11))),
    ],
    ids=["cyclic", "contiguous"],
)
def test_shards_list_their_pages(layout, pages, device):
    whole = make_problem(batch=3, seqlen_q=5, seqlen_k=170)
    page_ranges = pages_of_big_bird(SLOTS_OF_PAGES)
    whole.key_ranges = ranges_of_pages(page_ranges, SLOTS_OF_PAGES)
    parts = []
    for rank in range(layout.world_size):
        shard = with_page_list(
            whole.shard(layout, rank),
            patterns.local(page_ranges, pages, rank),
            layout.count(rank, SLOTS_OF_PAGES + 1),
        )
        parts.append(shard.to(device).run())
    whole.check(*merge_states(*(torch.stack(x) for x in zip(*parts, strict=True))))


@given(st.data())
def test_listed_pages_are_those_of_the_ranges(data):
    """Ranges of any bounds, empty, inverted, behind the table, and overlapping."""
    bound = st.integers(-2, 9)
    listed = data.draw(st.lists(st.tuples(bound, bound), min_size=1, max_size=4))
    lengths = data.draw(st.lists(st.integers(-3, 31), min_size=1, max_size=3))
    page_ranges = torch.tensor([[listed]])
    table, key_ranges = patterns.page_lists(
        page_ranges, torch.tensor([lengths]), torch.arange(10, 17, dtype=torch.int32)[None], 4
    )
    for length, (begin, end) in zip(lengths, key_ranges[0].tolist(), strict=True):
        keys = [(int(table[0, j // 4]) - 10) * 4 + j % 4 for j in range(begin, end)]
        is_seen = [any(b <= page < e for b, e in listed) for page in range(7)]
        assert keys == [j for j in range(min(length, 28)) if is_seen[j // 4]]


def test_nothing_is_read_on_the_host():
    """Tensors of the meta device have no values to read."""
    slots = torch.arange(5, device="meta")[None]
    table = torch.zeros(1, 11, dtype=torch.int32, device="meta")
    listed, ranges = patterns.page_lists(pages_of_big_bird(slots), slots + 1, table, PAGE)
    assert listed.shape == (1, 11) and ranges.shape == (1, 5, 2)


TABLE = torch.zeros(1, 4, dtype=torch.int32)


PAGE_RANGES = torch.zeros(1, 1, 2, 2, dtype=torch.int32)


def lists(page_ranges=PAGE_RANGES, lengths=SLOTS, table=TABLE, page_size=16):
    return patterns.page_lists(page_ranges, lengths, table, page_size)


def heads(number, slots=SLOTS[:, :5], dtype=torch.int32):
    q, k = torch.zeros(1, 4, 5, 8), torch.zeros(1, 2, 40, 8)
    return patterns.by_head(q, k, k, [patterns.window(slots, 4).to(dtype)] * number)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: patterns.window(SLOTS, 0), "window: size must be an integer of at least 1, got 0"),
        (lambda: patterns.first(SLOTS, -1), "first: count must be an integer .*, got -1"),
        (lambda: patterns.global_tokens(SLOTS, []), "number of ranges must be an integer"),
        (lambda: patterns.dilated(SLOTS, 3, dilation=0), "dilated: dilation must be an integer"),
        (lambda: patterns.random_blocks(SLOTS, 1, block=0, seed=0), "block must be an integer"),
        (lambda: patterns.window(SLOTS, 4.0), "window: size must be an integer of .*, got 4.0"),
        (lambda: patterns.dilated(SLOTS, True, dilation=1), "count must be .*, got True"),
        (lambda: patterns.global_tokens(SLOTS, [(0, 4.0)]), r"integers, got \[\(0, 4.0\)\]"),
        (lambda: patterns.random_blocks(SLOTS, 1, block=1, seed=-1), "seed must be .* 2147483647"),
        (lambda: patterns.window(SLOTS[0], 4), r"integers of shape \[batch, seqlen_q\]"),
        (lambda: patterns.window(SLOTS.float(), 4), r"got torch.float32 of shape \[1, 40\]"),
        (lambda: patterns.window(SLOTS + 2**31, 4), "window: slots must be below .* 2147483687;"),
        (lambda: patterns.random_blocks(SLOTS + 2**31, 1, block=1, seed=0), r"below 2\^31"),
        (lambda: patterns.block(SLOTS, 0), "block: size must be an integer of at least 1, got 0"),
        (lambda: heads(1), "by_head: key_ranges must be of 2 kv heads, got 1"),
        (lambda: heads(2, SLOTS[:, :4]), r"\[1, 5, num_ranges, 2\], got .* \[1, 4, 1, 2\]"),
        (lambda: heads(2, dtype=torch.float32), "by_head: key_ranges must be integers .*float32"),
        (lambda: lists(page_size=0), "page_lists: page_size must be .* at least 1, got 0"),
        (lambda: lists(page_size=16.0), "page_size must be an integer of at least 1, got 16.0"),
        (lambda: lists(table=TABLE.float()), "page_table must be integers .*, got torch.float32"),
        (lambda: lists(table=TABLE[0, 0]), r"page_table must be integers .* of shape \[\]"),
        (lambda: lists(table=TABLE[0]), r"page_table must be integers .* of shape \[4\]"),
        (lambda: lists(patterns.window(SLOTS, 2)),
         r"\[1, 1, num_ranges, 2\], as all queries .* see the same pages, .*\[1, 40, 1, 2\]"),
        (lambda: lists(torch.zeros(1, 1, 2, 2)), "page_ranges must be integers .*torch.float32"),
        (lambda: lists(torch.zeros(1, 1, 2).int()), r"page_ranges must be integers .*\[1, 1, 2\]"),
        (lambda: lists(lengths=SLOTS[0]), r"lengths must be integers of shape \[1, seqlen_q\]"),
        (lambda: lists(lengths=SLOTS.bool()), "lengths must be integers .*got torch.bool"),
    ],
)  # fmt: skip
def test_errors(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call()
