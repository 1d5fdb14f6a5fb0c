# SPDX-License-Identifier: BSD-3-Clause
"""`cascade_decode`: pages that sequences begin with in common are read once.

The mistakes these tests are for: a page that is read twice or by a sequence that has another, keys
behind a sequence's end in a page that others use, a group that is found too early or not at all,
positions counted from a group's first page, ids that nothing reads.
"""

from __future__ import annotations

import random
from typing import Any
from unittest import mock

import hypothesis
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from helpers import (
    assert_close_to_reference,
    assert_same_bits,
    make_strided,
    rounds_weights,
    to_device,
)
from tree_attention import cascade, cascade_decode, lean_decode, page_groups
from tree_attention.reference import quantise

PAGE = 4
# Of each sequence the pages in use: two groups, a group in a group, a page at the end of a sequence
# that others go on from, and sequences of their own.
TABLES = (
    (1, 2, 3, 4, 5, 6),
    (1, 2, 3, 4, 7),
    (1, 2, 3, 8, 9),
    (1, 2, 3),
    (10, 11),
    (12, 11, 3),
    (10, 11, 13),
    (),
)
NUM_PAGES = 14
LEAST = mock.patch.object(cascade, "_LEAST_KEYS_SAVED", 1)


def _case(
    seqlen_q: int = 1, num_ranges: int = 0, by_head: bool = False, seed: int = 0, **options: Any
) -> tuple[dict[str, Any], list[int]]:
    """Arguments with NaN in keys that nothing reads, and page ids that nothing may look at."""
    torch.manual_seed(seed)
    choice = random.Random(seed)
    batch, width = len(TABLES), 7
    q = torch.randn(batch, 8, seqlen_q, 16)
    k, v = torch.randn(NUM_PAGES, 2, PAGE, 16), torch.randn(NUM_PAGES, 2, PAGE, 12)
    k[0] = v[0] = torch.nan
    table = torch.full((batch, width), -7, dtype=torch.int32)
    ends = []
    for row, pages in enumerate(TABLES):
        table[row, : len(pages)] = torch.tensor(pages)
        ends.append(max(0, len(pages) * PAGE - choice.randrange(PAGE)))
    if by_head:
        table = table[:, None].expand(-1, 2, -1).clone()
    end = torch.tensor(ends)[:, None]
    shape = batch, seqlen_q
    begin = torch.randint(0, 4, shape)
    if num_ranges:
        cut = torch.minimum(begin + 3, end)
        ranges = torch.stack((torch.zeros(shape).long(), cut, cut + 2, end.expand(shape)), -1)
        ranges = ranges.view(*shape, 2, 2)
    else:
        ranges = torch.stack((begin, (end - torch.arange(seqlen_q).flip(0)).clamp(min=0)), -1)
    given = {"q": q, "k": k, "v": v, "key_ranges": ranges.int(), "page_table": table}
    return given | options, ends


def _check(given: dict[str, Any]) -> None:
    """Its groups are found, of the pages that queries see, and are read once."""
    with LEAST:
        found = cascade_decode(**given)
        groups = _groups_of(given)
    assert len(groups) == 3
    assert_same_bits(cascade_decode(**given, groups=groups), found)
    assert_close_to_reference(*found, **given)
    separate = lean_decode(**given, out_dtype=torch.float32)
    with LEAST:
        merged = cascade_decode(**given, out_dtype=torch.float32)
    assert not torch.equal(merged[0].nan_to_num(), separate[0].nan_to_num())


def _groups_of(given: dict[str, Any]) -> tuple[cascade.PageGroup, ...]:
    table, page_size = given["page_table"], given["k"].shape[2]
    numbers = [table.shape[-1]] * len(table)
    if (ranges := given.get("key_ranges")) is not None:
        ends = ranges[..., 1].where(ranges[..., 0] < ranges[..., 1], 0).flatten(1).amax(1)
        numbers = (-(-ends.clamp(0, numbers[0] * page_size) // page_size)).tolist()
    return page_groups(table, numbers, page_size)


@pytest.mark.parametrize("by_head", [False, True])
@pytest.mark.parametrize("seqlen_q, num_ranges", [(1, 0), (3, 0), (1, 2), (2, 2)])
def test_equals_the_reference(seqlen_q: int, num_ranges: int, by_head: bool) -> None:
    for seed in range(3):
        _check(_case(seqlen_q, num_ranges, by_head, seed)[0])


@pytest.mark.parametrize("seqlen_q, num_ranges", [(1, 0), (2, 2)])
def test_groups_on_any_device(seqlen_q: int, num_ranges: int, device: torch.device) -> None:
    given, _ = _case(seqlen_q, num_ranges)
    given["v"] = torch.randn(NUM_PAGES, 2, PAGE, 16)
    given["v"][0] = torch.nan
    with LEAST:
        groups = _groups_of(given)
    assert len(groups) == 3
    given = {name: to_device(x, device) for name, x in given.items()}
    assert_close_to_reference(*cascade_decode(**given, groups=groups), **given)


def test_ranges_that_begin_far_before_the_keys() -> None:
    given, _ = _case()
    given["key_ranges"][..., 0] = torch.iinfo(torch.int32).min
    _check(given)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_keys_of_8_bits(dtype: torch.dtype) -> None:
    given, _ = _case()
    for name in ("k", "v"):
        given[name], given[f"{name}_scale"] = quantise(given[name].nan_to_num(), dtype)
        given[f"{name}_scale"][0] = torch.nan
    _check(given)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_states_are_merged_before_they_are_rounded(dtype: torch.dtype) -> None:
    given, _ = _case(seqlen_q=2, softcap=3.0, softmax_scale=0.2)
    _check(given | {name: given[name].to(dtype) for name in "qkv"})
    with LEAST:
        halves = {name: given[name].to(dtype) for name in "qkv"}
        o, _ = cascade_decode(**given | halves, out_dtype=torch.float32)
        rounded, _ = cascade_decode(**given | halves)
    assert o.dtype == torch.float32
    # Weights have no more digits than what the states are merged to.
    assert torch.equal(o.to(dtype), rounded) != rounds_weights(rounded)


def test_alibi_counts_from_the_first_page() -> None:
    given, ends = _case(seqlen_q=2)
    positions = (torch.tensor(ends)[:, None] + torch.arange(2)).long()
    slopes = {"alibi_slopes": torch.linspace(0.01, 0.3, 8), "query_positions": positions}
    _check(given | slopes)
    # Without slopes, which may be said by None too, a layout changes nothing.
    none = {"alibi_slopes": None, "query_positions": None}
    _check(given | none | {"key_layout": (4, 4, 8)})
    # Blocks of a layout: its keys are no shift of each other.
    _check(given | slopes | {"key_layout": (4, 3, 8)})


def test_groups_are_found_in_the_table() -> None:
    table = torch.full((len(TABLES), 7), -7)
    for row, pages in enumerate(TABLES):
        table[row, : len(pages)] = torch.tensor(pages)
    numbers = [len(pages) for pages in TABLES]
    with LEAST:
        groups = {((0, 1, 2, 3), 0, 3), ((0, 1), 3, 4), ((4, 6), 0, 2)}
        assert {*page_groups(table, numbers, PAGE)} == groups
        assert {*page_groups(table, [3, 1, *numbers[2:]], PAGE)} == {
            ((0, 1, 2, 3), 0, 1), ((0, 2, 3), 1, 3), ((4, 6), 0, 2)
        }  # fmt: skip
    # What all have in common is short, and what two have is long, from the same page on.
    long = torch.arange(600).repeat(4, 1)
    long[2, 2:], long[3, 1:] = 1000, 2000
    for number, found in (
        ([600] * 4, (((0, 1), 0, 600),)),
        ([200] * 4, ()),
        ([512, 600, 600, 600], (((0, 1), 0, 512),)),
    ):
        assert page_groups(long, number, 8) == found
    assert page_groups(long[:0], [], 8) == ()


def test_groups_pay_earlier_with_more_heads_and_8_bits() -> None:
    def is_group(keys: int, **sizes: Any) -> bool:
        table = torch.cat(
            (torch.arange(keys // 64).repeat(9, 1), torch.arange(100, 109)[:, None]), 1
        )
        return bool(page_groups(table, [table.shape[1]] * 9, 64, **sizes))

    small = {"num_heads_q": 4, "num_heads_kv": 1, "head_dim": 64}
    assert is_group(512) and not is_group(512, **small) and is_group(64 * 99, **small)
    assert not is_group(320) and is_group(320, has_8_bits=True)
    # cascade_decode, which sees the heads, finds as many.
    for heads_kv, finds in ((8, True), (1, False)):
        q, pages = torch.randn(9, 4 * heads_kv, 1, 128), torch.randn(20, heads_kv, 64, 128)
        table = torch.cat((torch.arange(8).repeat(9, 1), torch.arange(8, 17)[:, None]), 1).int()
        given = {"q": q, "k": pages, "v": pages, "page_table": table}
        sizes = {"num_heads_q": 4 * heads_kv, "num_heads_kv": heads_kv}
        groups = page_groups(table, [9] * 9, 64, **sizes)
        assert bool(groups) == finds
        assert_same_bits(cascade_decode(**given), cascade_decode(**given, groups=groups))


def test_where_little_is_saved_it_is_lean_decode() -> None:
    given, _ = _case()
    assert_same_bits(cascade_decode(**given), lean_decode(**given))
    with LEAST:
        groups = page_groups(given["page_table"], [6] + [0] * 7, PAGE)
        assert_same_bits(cascade_decode(**given, groups=groups), lean_decode(**given))


def test_pages_that_few_or_no_queries_see_save_nothing() -> None:
    """Windows, for example, which have moved on from what sequences begin with."""
    k, v = torch.randn(40, 2, PAGE, 16), torch.randn(40, 2, PAGE, 16)
    table = torch.arange(20).repeat(3, 1)
    table[:, 16:] = torch.arange(20, 32).view(3, 4)
    given: dict[str, Any] = {"q": torch.randn(3, 4, 1, 16), "k": k, "v": v}
    given["page_table"] = table.int()
    ranges = torch.tensor([[[64, 80]], [[60, 80]], [[66, 80]]]).int()
    with LEAST:
        assert_same_bits(
            cascade_decode(**given, key_ranges=ranges),
            lean_decode(**given, key_ranges=ranges),
        )
    ranges[0, 0, 0] = 52  # of twelve keys the second sequence sees four
    with mock.patch.object(cascade, "_LEAST_KEYS_SAVED", 5):
        assert_same_bits(
            cascade_decode(**given, key_ranges=ranges), lean_decode(**given, key_ranges=ranges)
        )
    with mock.patch.object(cascade, "_LEAST_KEYS_SAVED", 4):
        o, lse = cascade_decode(**given, key_ranges=ranges)
    assert not torch.equal(o, lean_decode(**given, key_ranges=ranges)[0])
    assert_close_to_reference(o, lse, **given, key_ranges=ranges)


def test_all_keys_of_the_pages() -> None:
    k, v = torch.randn(5, 2, PAGE, 16), torch.randn(5, 2, PAGE, 16)
    table = torch.tensor([[0, 1, 2], [0, 1, 3], [0, 1, 4]]).int()
    given: dict[str, Any] = {"q": torch.randn(3, 4, 1, 16), "k": k, "v": v, "page_table": table}
    with LEAST:
        assert _groups_of(given) == (((0, 1, 2), 0, 2),)
        assert_close_to_reference(*cascade_decode(**given), **given)


def test_latents() -> None:
    """Values are the first columns of the keys, with the same scales."""
    given, _ = _case(seqlen_q=2)
    latents = torch.randn(NUM_PAGES, 1, PAGE, 48)
    given |= {"q": torch.randn(len(TABLES), 8, 2, 48), "k": latents, "v": latents[..., :32]}
    _check(given)
    eight, scale = quantise(latents, torch.int8)
    _check(given | {"k": eight, "v": eight[..., :32], "k_scale": scale, "v_scale": scale})


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    """Random trees of pages, as sequences that were forked at any page from any other."""
    torch.manual_seed(draw(st.integers(0, 2**31)))
    batch, width, page_size = (draw(st.integers(1, n)) for n in (9, 7, 20))
    num_heads_kv, num_pages = draw(st.integers(1, 2)), 40
    by_head, seqlen_q = draw(st.booleans()), draw(st.sampled_from([1, 1, 2, 4]))
    table = torch.randint(1, num_pages, (batch, num_heads_kv if by_head else 1, width))
    for row in range(1, batch):
        parent, length = draw(st.integers(0, row - 1)), draw(st.integers(0, width))
        table[row, :, :length] = table[parent, :, :length]
    dim, dim_v = draw(st.sampled_from([(16, 16), (64, 64), (32, 40), (128, 128)]))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    k = torch.randn(num_pages, num_heads_kv, page_size, dim)
    v = torch.randn(num_pages, num_heads_kv, page_size, dim_v)
    if draw(st.booleans()):
        v = k[..., : min(dim, dim_v)]
    heads = num_heads_kv * draw(st.sampled_from([1, 3, 4, 16]))
    options: dict[str, Any] = {}
    kv_dtype = draw(st.sampled_from([None, None, torch.int8, torch.float8_e4m3fn]))
    if kv_dtype is None:
        k, v = k.to(dtype), v.to(dtype)
        k[0] = v[0] = torch.nan
    else:
        (k, k_scale), (v, v_scale) = quantise(k, kv_dtype), quantise(v, kv_dtype)
        k_scale[0] = v_scale[0] = torch.nan
        options |= {"k_scale": k_scale, "v_scale": v_scale}
    q = make_strided(
        torch.randn(batch, heads, seqlen_q, dim).to(dtype),
        draw(st.sampled_from(["BHSD", "BSHD", "padded", "unaligned"])),
    )
    total = width * page_size
    kind = draw(st.sampled_from(["all", "from 0", "any", "window", "several"]))
    if kind != "all":
        shape = (batch, seqlen_q, draw(st.integers(1, 3)) if kind == "several" else 1)
        ends = torch.randint(-2, total + 3, shape)
        begins = torch.randint(-2, total + 3, shape)
        begins = {"from 0": ends.clamp(max=0), "window": ends - total // 3}.get(kind, begins)
        ranges = torch.stack((begins, ends), -1).int()
        options["key_ranges"] = ranges if kind == "several" else ranges[:, :, 0]
        # Pages that no range reaches hold any numbers: those of a hole, of a beginning, of the end.
        seen = torch.zeros(batch, width, dtype=torch.bool)
        for row, begin, end in zip(
            torch.arange(batch).repeat_interleave(seqlen_q * shape[2]).tolist(),
            begins.flatten().clamp(0, total).tolist(),
            ends.flatten().clamp(0, total).tolist(),
            strict=True,
        ):
            if begin < end:
                seen[row, begin // page_size : -(-end // page_size)] = True
        if draw(st.booleans()):
            table = table.where(seen[:, None], torch.randint(-3, 99, table.shape))
    if draw(st.booleans()):
        options["query_positions"] = torch.randint(0, 2 * total, (batch, seqlen_q))
        options["alibi_slopes"] = torch.rand(heads) / 8
        options["key_layout"] = draw(st.sampled_from([(0, 1, 1), (3, page_size, 2 * page_size)]))
    options["softcap"] = draw(st.sampled_from([0.0, 0.0, 3.0]))
    options["num_workers"] = draw(st.sampled_from([0, 0, 1, 3]))
    options["page_table"] = (table if by_head else table[:, 0]).int()
    return {"q": q, "k": k, "v": v, **options}


@pytest.mark.deep
@settings(max_examples=150, deadline=None)
@hypothesis.given(cases())
def test_any_tables(given: dict[str, Any]) -> None:
    with LEAST:
        found = cascade_decode(**given)
    del given["num_workers"]
    assert_close_to_reference(*found, **given)


def _out_of_range(table: Tensor) -> Tensor:
    table[:4, 1] = NUM_PAGES
    return table


def test_what_is_refused() -> None:
    given, _ = _case()
    whole = {name: x for name, x in given.items() if name != "page_table"}
    with pytest.raises(ValueError, match=r"cascade_decode: page_table is required, as it says whi"):
        cascade_decode(**whole)
    with pytest.raises(ValueError, match=r"cascade_decode: num_workers must not be -1"):
        cascade_decode(**given, num_workers=-1)
    with pytest.raises(ValueError, match=r"^lean_decode: "):
        cascade_decode(**given | {"k": given["k"].double()})
    says = r"^lean_decode: page_table must hold page ids .* got 14 for page 1 of sequence 0"
    with LEAST, pytest.raises(ValueError, match=says):
        cascade_decode(**given | {"page_table": _out_of_range(given["page_table"].clone())})
    with pytest.raises(TypeError, match="page_groups: page_table must be a tensor"):
        page_groups([[1]], [1], 4)


@pytest.mark.parametrize("table", [torch.ones(2), torch.ones(2, 3), torch.ones(2, 3).to("meta")])
def test_tables_without_groups(table: Tensor) -> None:
    with pytest.raises(ValueError, match=r"page_groups: page_table must be integers .*, got torch"):
        page_groups(table, [3, 3], 4)


@pytest.mark.parametrize("numbers", [3, None, [3], [3, 4], [-1, 3], [3.0, 3], [[3, 3]]])
def test_numbers_of_pages_that_are_refused(numbers: Any) -> None:
    says = "page_groups: num_pages must be an integer from 0 to 3 for each of 2 sequences, got"
    with pytest.raises((TypeError, ValueError), match=says):
        page_groups(torch.ones(2, 3).int(), numbers, 4)


@pytest.mark.parametrize("size", [0, -4, "4", 4.0, None])
def test_sizes_of_pages_that_are_refused(size: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="page_groups: page_size must be an integer"):
        page_groups(torch.ones(2, 3).int(), [3, 3], size)
    for name in ("num_heads_q", "num_heads_kv", "head_dim"):
        with pytest.raises(
            (TypeError, ValueError), match=f"page_groups: {name} must be an integer"
        ):
            page_groups(torch.ones(2, 3).int(), [3, 3], 4, **{name: size})
    with pytest.raises(TypeError, match="page_groups: has_8_bits must be"):
        page_groups(torch.ones(2, 3).int(), [3, 3], 4, has_8_bits=size)


KINDS_OF_GROUPS: list[Any] = [
    *(5, "ab", [5], [((0, 1), 0, 2)], torch.zeros(3)),
    [cascade.PageGroup((0.0, 1), 0, 3)],  # type: ignore[arg-type]
    [cascade.PageGroup((0, 1), None, 3)],  # type: ignore[arg-type]
    [cascade.PageGroup((0, 1), 0, "3")],  # type: ignore[arg-type]
    [cascade.PageGroup((0, 1), 0, 1 << 63)],
]


@pytest.mark.parametrize("groups", KINDS_OF_GROUPS)
def test_groups_of_another_kind(groups: Any) -> None:
    says = "cascade_decode: groups must be what page_groups returned, or None, got"
    with pytest.raises(TypeError, match=says):
        cascade_decode(**_case()[0], groups=groups)


WRONG_GROUPS: dict[str, list[tuple[Any, Any, Any]]] = {
    "another row": [((0, 4), 0, 3)],
    "no such row": [((0, 8), 0, 3)],
    "rows below 0": [((-8, 1), 0, 3)],
    "a row twice": [((0, 0), 0, 3)],
    "no rows": [((), 0, 3)],
    "beyond the table": [((4,), 0, 8)],
    "one page more": [((0, 1), 0, 5)],
    "no pages": [((0, 1), 0, 0)],
    "before the table": [((0, 1), -1, 3)],
    "not from the first page": [((0, 1), 1, 3)],
    "the same pages again": [((0, 1, 2), 0, 3), ((0, 1), 0, 3)],
    "a page left out": [((0, 1, 2), 0, 2), ((0, 1), 3, 4)],
}


@pytest.mark.parametrize("case", WRONG_GROUPS)
def test_groups_of_another_table(case: str) -> None:
    """They would read keys twice, not at all, or of another sequence."""
    groups = [cascade.PageGroup(*group) for group in WRONG_GROUPS[case]]
    with pytest.raises(ValueError, match=r"groups must be those that page_groups finds in page_ta"):
        cascade_decode(**_case()[0], groups=groups)
