# SPDX-License-Identifier: BSD-3-Clause
"""Chosen keys as pages of the cache: `patterns.by_rows`, and `ShardLayout.local_rows`."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from helpers import assert_same_bits
from tiers import tiers
from tree_attention import (
    BlockCyclic,
    Contiguous,
    ContiguousThenCyclic,
    ShardLayout,
    lean_decode,
    merge_states,
)
from tree_attention.patterns import by_rows

NAN = torch.nan
# Where keys and values `[batch, num_heads_kv, seqlen_k, head_dim]` lie in memory.
PLACES: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x.contiguous(),
    "tokens first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "capacity": lambda x: torch.cat([x, torch.full_like(x[:, :, :5], NAN)], 2)[:, :, : x.shape[2]],
    "sequences last": lambda x: x.movedim(0, 2).contiguous().movedim(2, 0),
    "columns": lambda x: torch.cat([x, torch.full_like(x, NAN)], 3)[..., : x.shape[3]],
}


def choice(shape: tuple[int, ...], end: int) -> Tensor:
    """Rows in ascending order, and then -1; of some queries none."""
    *queries, n = shape
    rows = torch.full(shape, -1, dtype=torch.int32).view(-1, n)
    generator = torch.Generator().manual_seed(end)
    for i, row in enumerate(rows):
        count = i % (min(n, end) + 1)
        row[:count] = torch.randperm(end, generator=generator)[:count].sort().values
    return rows.view(*queries, n)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "batch, num_heads_kv, seqlen_q, seqlen_k, block",
    [(1, 1, 1, 40, 1), (2, 3, 2, 33, 1), (2, 2, 3, 40, 8), (1, 2, 2, 43, 8), (2, 1, 1, 44, 8)],
)
@pytest.mark.parametrize("is_shared", tiers([False], [True]))
def test_each_query_sees_its_rows(
    batch: int,
    num_heads_kv: int,
    seqlen_q: int,
    seqlen_k: int,
    block: int,
    is_shared: bool,
    dtype: torch.dtype,
    place: str,
) -> None:
    torch.manual_seed(0)
    q = torch.randn(batch, 2 * num_heads_kv, seqlen_q, 16, dtype=dtype)
    k, v = (torch.randn(batch, num_heads_kv, seqlen_k, d, dtype=dtype) for d in (16, 8))
    end = -(-seqlen_k // block)
    rows = choice((batch, 1 if is_shared else num_heads_kv, seqlen_q, 6), end)
    rows[0, 0, -1, 0] = end - 1  # the last block, which may not be whole
    rows[0, 0, -1, 1:] = -1
    lengths = torch.randint(1, seqlen_k + 1, (batch, seqlen_q))
    for given_lengths in (None, lengths):
        found = by_rows(q, *map(PLACES[place], (k, v)), rows, given_lengths, block=block)
        paged_q, paged_k, paged_v, key_ranges, page_table = found
        assert key_ranges.dtype == page_table.dtype == torch.int32
        o, lse = lean_decode(paged_q, paged_k, paged_v, key_ranges, page_table=page_table)
        o = o.view(batch, num_heads_kv, seqlen_q, 2, 8)
        lse = lse.view(batch, num_heads_kv, seqlen_q, 2)
        for b in range(batch):
            for head in range(num_heads_kv):
                for t in range(seqlen_q):
                    own = rows[b, 0 if is_shared else head, t]
                    seen = (own[own >= 0, None] * block + torch.arange(block)).flatten()
                    limit = seqlen_k if given_lengths is None else int(lengths[b, t])
                    seen = seen[seen < limit].long()
                    expected = lean_decode(
                        q[b, None, 2 * head : 2 * head + 2, t, None],
                        k[b, None, head, None, seen],
                        v[b, None, head, None, seen],
                    )
                    torch.testing.assert_close(o[b, head, t], expected[0][0, :, 0])
                    torch.testing.assert_close(lse[b, head, t], expected[1][0, :, 0])


def test_no_key_is_copied() -> None:
    latents = torch.randn(2, 1, 50, 24)
    rows = torch.tensor([[[[0, 7, 49]]]]).int().expand(2, 1, 1, 3)
    _, k, v, *_ = by_rows(torch.randn(2, 4, 1, 24), latents, latents[..., :16], rows)
    for x, width in ((k, 24), (v, 16)):
        assert x.shape[1:] == (1, 1, width)
        assert x.untyped_storage().data_ptr() == latents.untyped_storage().data_ptr()


def test_bits_are_those_of_rows_side_by_side() -> None:
    q, k = torch.randn(1, 16, 1, 64), torch.randn(1, 1, 300, 64)
    rows = torch.arange(1, 300, 3).int()
    paged = by_rows(q, k, k[..., :32], rows.view(1, 1, 1, -1))
    found = lean_decode(*paged[:4], page_table=paged[4], num_workers=-1)
    chosen = k[:, :, rows.long()]
    expected = lean_decode(q, chosen, chosen[..., :32], num_workers=-1)
    assert_same_bits(found, expected)


def test_compiles_into_one_graph() -> None:
    def attend(q: Tensor, k: Tensor, rows: Tensor) -> Tensor:
        *arguments, page_table = by_rows(q, k, k[..., :8], rows)
        return lean_decode(*arguments, page_table=page_table)[0]

    q, k = torch.randn(2, 4, 3, 16), torch.randn(2, 1, 30, 16)
    rows = choice((2, 1, 3, 5), 30)
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert torch.equal(compiled(q, k, rows), attend(q, k, rows))


def int32(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int32)


ASCENDING = "rows must be in ascending order, each once, and then -1; ShardLayout.local_rows sorts"
REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"k": [1]}, TypeError, "k must be a tensor, got [1]"),
    ({"lengths": 3}, TypeError, "lengths must be a tensor, got 3"),
    ({"q": torch.ones(4, 3, 8)}, ValueError,
     "q must have shape [batch, heads, tokens, head_dim], got [4, 3, 8]"),
    ({"v": torch.ones(2, 2, 10, 16)[..., ::2]}, ValueError,
     "v must have a contiguous last axis, got stride 2"),
    ({"v": torch.ones(2, 2, 11, 8)}, ValueError,
     "k and v must have q's batch and the same heads and tokens, got q [2, 4, 3, 8], k "),
    ({"q": torch.ones(2, 3, 3, 8)}, ValueError,
     "num_heads_q must be a multiple of num_heads_kv, got 3 and 2"),
    ({"rows": int32(2, 2, 3, 5).long()}, ValueError,
     "rows must be int32 of shape [2, 1 or 2, 3, n], got torch.int64 of shape [2, 2, 3, 5]"),
    ({"rows": int32(2, 4, 3, 5)}, ValueError,
     "rows must be int32 of shape [2, 1 or 2, 3, n], got torch.int32 of shape [2, 4, 3, 5]"),
    ({"rows": int32(2, 1, 3, 1) + 10}, ValueError, "rows must be below 10, as k has them, got 10"),
    ({"rows": int32(2, 1, 3, 1) + 5, "block": 2}, ValueError, "rows must be below 5, as k has"),
    ({"rows": int32(2, 1, 3, 1) - 2}, ValueError, ASCENDING),
    ({"rows": int32(2, 1, 3, 2)}, ValueError, ASCENDING),
    ({"rows": torch.tensor([3, 2]).int().expand(2, 1, 3, 2)}, ValueError, ASCENDING),
    ({"rows": torch.tensor([-1, 2]).int().expand(2, 1, 3, 2)}, ValueError, ASCENDING),
    ({"lengths": int32(2, 4)}, ValueError,
     "lengths must be integers of shape [2, 3], got torch.int32 of shape [2, 4]"),
    ({"lengths": torch.ones(2, 3)}, ValueError, "lengths must be integers of shape [2, 3], got"),
    ({"block": 0}, ValueError, "block must be an integer of at least 1, got 0"),
    ({"block": 1.0}, TypeError, "block must be an integer of at least 1, got 1.0"),
    ({"v": torch.ones(2, 10, 2, 8).transpose(1, 2)}, ValueError,
     "v must lie in memory as k does, got strides [160, 80, 8, 1] of k and [160, 8, 16, 1] of v"),
]  # fmt: skip


@pytest.mark.parametrize(
    "changed, error, message", REFUSED, ids=lambda x: x if isinstance(x, str) else ""
)
def test_refused_by_by_rows(changed: dict[str, Any], error: type[Exception], message: str) -> None:
    right = {
        "q": torch.ones(2, 4, 3, 8),
        "k": torch.ones(2, 2, 10, 8),
        "v": torch.ones(2, 2, 10, 8),
        "rows": int32(2, 2, 3, 1),
    }
    with pytest.raises(error, match=f"^by_rows: {re.escape(message)}"):
        by_rows(**right | changed)


def layouts() -> list[ShardLayout]:
    return [
        BlockCyclic(1),
        BlockCyclic(3, block=4),
        BlockCyclic(2, block=64),
        Contiguous((0, 5, 5, 60, 100)),
        ContiguousThenCyclic((0, 20, 30), block=8),
    ]


@given(st.integers(0, 4), st.lists(st.integers(-1, 99), max_size=12), st.sampled_from([1, 2, 5]))
def test_local_rows_are_those_of_the_held_slots(which: int, named: list[int], block: int) -> None:
    layout = layouts()[which]
    slots = torch.tensor([[n // block for n in named], [-1] * len(named)], dtype=torch.int32)
    slots[0, 1:][slots[0, 1:] == slots[0, :1]] = -1
    all_rows = []
    for rank in range(layout.world_size):
        rows = layout.local_rows(rank, slots, block)
        assert rows.dtype == torch.int32 and rows.shape == (2, len(named) * block)
        held = layout.local_slots_of(rank, torch.arange(110))
        wanted = [
            int(held[slot])
            for slot in range(110)
            for chosen in slots[0].tolist()
            if chosen >= 0 and slot // block == chosen and held[slot] >= 0
        ]
        assert rows[0].tolist() == sorted(wanted) + [-1] * (rows.shape[1] - len(wanted))
        assert (rows[1] == -1).all()
        all_rows += layout.global_slots(rank, rows[0][rows[0] >= 0]).tolist()
    if not isinstance(layout, Contiguous):
        chosen = [n for n in slots[0].tolist() if n >= 0]
        assert sorted(all_rows) == sorted(n * block + i for n in chosen for i in range(block))


def test_local_rows_refuse_what_is_no_slot() -> None:
    layout = BlockCyclic(2)
    with pytest.raises(TypeError, match=r"^BlockCyclic: slots must be integers, got torch.float32"):
        layout.local_rows(0, torch.ones(2))
    with pytest.raises(ValueError, match=r"^BlockCyclic: block must be an integer from 1 to"):
        layout.local_rows(0, torch.ones(2).int(), block=0)
    with pytest.raises(ValueError, match=r"^BlockCyclic: rank must be in \[0, 2\), got 2"):
        layout.local_rows(2, torch.ones(2).int())
    for slots, error, says in (
        (None, TypeError, r"slots must be a tensor, got None"),
        ([1, 2], TypeError, r"slots must be a tensor, got \[1, 2\]"),
        ("12", TypeError, r"slots must be a tensor, got '12'"),
        (torch.tensor(3), ValueError, r"slots must have shape \[..., n\], got \[\]"),
        (torch.tensor([3, 2**32]), ValueError, r"slots must be below 2\^31, got 4294967296$"),
    ):
        with pytest.raises(error, match=f"^BlockCyclic: {says}"):
            layout.local_rows(0, slots)
    assert layout.local_rows(0, torch.tensor([2**31 - 2 - 64])).tolist() == [2**30 - 2]
    with pytest.raises(ValueError, match=r"slots must be below 2\^31, got 536870912 as a block of"):
        layout.local_rows(0, torch.tensor([2**29]), block=4)
    with pytest.raises(ValueError, match=r"block must be an integer from 1 to 2147483647, got"):
        layout.local_rows(0, torch.tensor([1]), block=2**62)


def test_rows_of_all_ranks_merge_to_the_rows_of_one() -> None:
    """One choice of global slots, attended on shards and as a whole."""
    q, k = torch.randn(1, 4, 2, 16), torch.randn(1, 1, 100, 16)
    slots = choice((1, 1, 2, 40), 100).roll(1, -1)  # in no order
    slots[..., 0] = torch.where(slots[..., 0] == -1, 99, slots[..., 0])
    layout = BlockCyclic(3, block=8)
    states = []
    for part, own in [(BlockCyclic(1), k)] + [
        (layout, k[:, :, layout.local_slots(rank, 0, 100)]) for rank in range(3)
    ]:
        rank = len(states) - 1 if part is layout else 0
        *arguments, page_table = by_rows(q, own, own, part.local_rows(rank, slots))
        states.append(lean_decode(*arguments, page_table=page_table))
    whole, *parts = states
    merged = merge_states(*(torch.stack(x) for x in zip(*parts, strict=True)))
    for found, expected in zip(merged, whole, strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.deep
def test_rows_in_a_graph_of_any_length() -> None:
    """Strides of a cache that grows are symbols there."""
    torch._dynamo.reset()
    compiled = torch.compile(by_rows, fullgraph=True, dynamic=True, backend="eager")
    for length in (20, 33):
        q, k = torch.randn(2, 4, 1, 16), torch.randn(2, 2, length, 16)
        rows = choice((2, 2, 1, 6), length)
        for found, expected in zip(
            compiled(q, k, k[..., :8], rows), by_rows(q, k, k[..., :8], rows), strict=True
        ):
            assert torch.equal(found, expected)
