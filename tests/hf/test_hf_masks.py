# SPDX-License-Identifier: BSD-3-Clause
"""Key ranges against the masks that transformers makes for sdpa from the same arguments."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("transformers")

from torch import Tensor
from transformers import masking_utils

from tree_attention import BlockCyclic
from tree_attention.hf.masks import KeyRanges, tree_attention_mask


def _mask(**arguments: Any) -> KeyRanges:
    """As the models call it: by keyword, with some that do not matter here."""
    return tree_attention_mask(
        allow_is_causal_skip=True, dtype=torch.float32, config=None, device="cpu", **arguments
    )


def _visible(ranges: Tensor, kv_length: int) -> Tensor:
    slots = torch.arange(kv_length)
    return (ranges[..., :1] <= slots) & (slots < ranges[..., 1:])


@st.composite
def _arguments(draw: st.DrawFn) -> dict[str, Any]:
    batch_size, q_length, past = draw(st.tuples(*[st.integers(1, 4)] * 2, st.integers(0, 9)))
    kv_length = past + q_length
    window = draw(st.none() | st.integers(1, 12))
    attention_mask = None
    if draw(st.booleans()):
        runs = draw(
            st.lists(
                st.tuples(*[st.integers(0, kv_length)] * 2),
                min_size=batch_size,
                max_size=batch_size,
            )
        )
        slots = torch.arange(kv_length)
        first, last = torch.tensor(runs).sort(-1).values[..., None].unbind(1)
        attention_mask = (first <= slots) & (slots < last)  # left and right padding, empty rows
    arguments = {
        "batch_size": batch_size,
        "q_length": q_length,
        "kv_length": kv_length,
        "q_offset": past,
        "kv_offset": 0,
        "mask_function": masking_utils.causal_mask_function,
        "attention_mask": attention_mask,
        "use_vmap": False,
    }
    if window is not None:
        arguments["mask_function"] = masking_utils.sliding_window_causal_mask_function(window)
        arguments["local_size"] = window
    return arguments


@given(_arguments())
def test_ranges_equal_the_masks_of_transformers(arguments: dict[str, Any]) -> None:
    expected = masking_utils.sdpa_mask(**arguments | {"allow_is_causal_skip": False})
    mask = _mask(**arguments)
    assert mask.unsupported is None
    assert torch.equal(_visible(mask.whole(), arguments["kv_length"]), expected[:, 0])


@given(_arguments(), st.integers(1, 4), st.integers(1, 5))
def test_shards_see_what_the_whole_sees(
    arguments: dict[str, Any], world_size: int, block: int
) -> None:
    mask, layout = _mask(**arguments), BlockCyclic(world_size, block)
    kv_length = arguments["kv_length"]
    whole = _visible(mask.ranges, kv_length)
    for rank in range(world_size):
        slots = layout.local_slots(rank, 0, kv_length)
        local = mask.local(layout, rank)
        assert local.dtype == torch.int32
        assert torch.equal(_visible(local, len(slots)), whole[..., slots])


def test_local_ranges_are_computed_once_per_shard() -> None:
    mask = _mask(batch_size=2, q_length=3, kv_length=9, q_offset=6)
    first = mask.local(BlockCyclic(2, 4), 1)
    assert mask.local(BlockCyclic(2, 4), 1) is first
    assert not torch.equal(mask.local(BlockCyclic(2, 4), 0), first)
    assert mask.whole() is mask.whole()
    assert not torch.equal(mask.whole(), first)


def test_keys_that_begin_at_an_offset() -> None:
    """Sliding layers of transformers' own caches keep the last keys only."""
    window, past, q_length = 4, 10, 2
    mask = _mask(
        batch_size=1,
        q_length=q_length,
        kv_length=window - 1 + q_length,
        q_offset=past,
        kv_offset=past - window + 1,
        mask_function=masking_utils.sliding_window_causal_mask_function(window),
        local_size=window,
    )
    assert mask.unsupported is None
    assert mask.whole().tolist() == [[[0, 4], [1, 5]]]


NO_RANGES: dict[str, Callable[..., Tensor]] = {
    "chunked": masking_utils.chunked_causal_mask_function(3, torch.zeros(1).int()),
    "bidirectional": masking_utils.bidirectional_mask_function,
    "unannounced_window": masking_utils.sliding_window_causal_mask_function(5),
    "blockwise": masking_utils.or_masks(
        masking_utils.causal_mask_function,
        lambda row, head, query, key: (query // 3 == 0) & (key // 3 == 0),
    ),
    "packed": masking_utils.and_masks(
        masking_utils.causal_mask_function,
        masking_utils.packed_sequence_mask_function(torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]])),
    ),
}


@pytest.mark.parametrize("name", NO_RANGES)
def test_masks_that_are_no_range_are_marked(name: str) -> None:
    """Marked, not raised: models make masks that none of their layers uses."""
    mask = _mask(batch_size=1, q_length=8, kv_length=8, mask_function=NO_RANGES[name])
    assert mask.unsupported is not None
    assert "causal and sliding-window masks only" in mask.unsupported


def test_custom_mask_functions_are_marked() -> None:
    mask = _mask(
        batch_size=1, q_length=2, kv_length=2, mask_function=lambda *_: None, use_vmap=True
    )
    assert mask.unsupported is not None
    assert "a custom mask function has no form as a range of keys" in mask.unsupported


# A padding mask, the number of cached tokens, the hole that is named, and the advice.
_ALONE, _ONES = "each such row alone", "torch.ones_like"
HOLES: dict[str, tuple[list[list[int]], int, str, str]] = {
    "inside the prompt": (
        [[1, 1, 1, 1, 1, 1], [1, 0, 1, 0, 0, 1]],
        0,
        "1 has a second hole, zeros at 3 to 4",
        _ONES,
    ),
    "several rows": (
        [[1, 0, 0, 1, 0, 1], [1, 1, 1, 1, 1, 1], [1, 0, 1, 0, 1, 1]],
        0,
        "0 (and 1 more) has a second hole, zeros at 4 to 4",
        _ONES,
    ),
    "behind padding": ([[0, 1, 0, 1, 0, 1]], 0, "0 has a second hole, zeros at 4 to 4", _ONES),
    "an earlier turn": (
        [[1, 1, 1, 1, 1, 1], [1, 0, 1, 0, 0, 1]],
        5,
        "1 has a second hole, zeros at 3 to 4",
        _ALONE,
    ),
    "its last token": ([[1, 0, 1, 0, 1, 1]], 3, "0 has a second hole, zeros at 3 to 3", _ALONE),
    "a second prompt": ([[1, 0, 1, 0, 1, 1]], 2, "0 has a second hole, zeros at 3 to 3", _ONES),
}


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
@pytest.mark.parametrize("name", HOLES)
def test_several_holes_are_marked(name: str, dtype: torch.dtype) -> None:
    rows, cached, where, advice = HOLES[name]
    padding = torch.tensor(rows, dtype=dtype)
    batch, length = padding.shape
    for offset in (cached, torch.tensor(cached)):  # of a cache of fixed size
        arguments = {"batch_size": batch, "q_length": length - cached, "kv_length": length}
        mask = _mask(**arguments, q_offset=offset, attention_mask=padding)
        assert mask.unsupported is not None
        assert mask.unsupported.startswith("the padding mask of each row must have at most one")
        assert f"row {where.replace('at', 'at columns')} between ones" in mask.unsupported
        assert advice in mask.unsupported
        assert ({_ALONE, _ONES} - {advice}).pop() not in mask.unsupported


@st.composite
def _with_holes(draw: st.DrawFn) -> tuple[list[list[int]], int, int | None]:
    """Rows of padding, tokens, padding, tokens and padding, of which each may be missing."""
    cuts = st.lists(st.integers(0, 14), min_size=4, max_size=4).map(sorted)
    rows = draw(st.lists(cuts, min_size=1, max_size=4))
    return rows, draw(st.integers(1, 14)), draw(st.none() | st.integers(1, 9))


@given(_with_holes())
def test_behind_a_hole_tokens_are_counted(
    case: tuple[list[list[int]], int, int | None],
) -> None:
    """Each token sees what it would see without padding."""
    rows, q_length, window = case
    slots = torch.arange(14)
    first, hole, end, last = torch.tensor(rows).T[..., None]
    padding = ((first <= slots) & (slots < hole)) | ((end <= slots) & (slots < last))
    sizes = {"batch_size": len(rows), "q_length": q_length, "kv_length": 14}
    sizes |= {"q_offset": 14 - q_length, "attention_mask": padding.long()}
    if window is not None:
        function = masking_utils.sliding_window_causal_mask_function(window)
        sizes |= {"mask_function": function, "local_size": window}
    mask = _mask(**sizes)
    assert mask.unsupported is None
    ranges = mask.ranges if mask.skipped is not None else mask.ranges[:, :, None]
    visible = ((ranges[..., :1] <= slots) & (slots < ranges[..., 1:])).sum(2)
    assert visible.max() <= 1  # no slot is in both ranges
    for row, is_token in enumerate(padding):
        tokens = is_token.nonzero()[:, 0]
        for query in range(q_length):
            slot = 14 - q_length + query
            if is_token[slot]:
                before = tokens[tokens <= slot][-(window or 14) :]
                assert visible[row, query].nonzero()[:, 0].tolist() == before.tolist()
                assert mask.positions[row, query] == slot
                if mask.skipped is not None:
                    hidden = (~is_token[tokens[0] : slot]).sum()
                    assert mask.skipped[row, query] == hidden


@given(_with_holes(), st.integers(0, 14))
def test_ranges_within_two_runs_of_slots_are_those_of_all(
    case: tuple[list[list[int]], int, int | None], cut: int
) -> None:
    rows, q_length, _ = case
    slots = torch.arange(14)
    first, hole, end, last = torch.tensor(rows).T[..., None]
    padding = ((first <= slots) & (slots < hole)) | ((end <= slots) & (slots < last))
    sizes = {"batch_size": len(rows), "q_length": q_length, "kv_length": 14}
    mask = _mask(**sizes, q_offset=14 - q_length, attention_mask=padding.long())
    found = torch.zeros(len(rows), q_length, 14, dtype=torch.int64)
    distances = torch.full_like(found, -1)
    for part in (mask.within(0, cut), mask.within(cut, 14)):
        ranges, positions = part.ranges, part.positions[..., None]
        if part.skipped is None:
            ranges, positions = ranges[:, :, None], positions[..., None]
        else:
            skipped = torch.stack((part.skipped, torch.zeros_like(part.skipped)), -1)
            positions = (positions - skipped)[..., None]
        visible = (ranges[..., :1] <= slots) & (slots < ranges[..., 1:])
        found += visible.sum(2)
        distances = torch.where(visible, positions - slots, -1).amax(2).maximum(distances)
    whole = mask.ranges if mask.skipped is not None else mask.ranges[:, :, None]
    assert torch.equal(found, ((whole[..., :1] <= slots) & (slots < whole[..., 1:])).sum(2))
    for row, query, slot in found.nonzero().tolist():
        if padding[row, 14 - q_length + query]:
            tokens = padding[row, slot : 14 - q_length + query].sum()
            assert distances[row, query, slot] == tokens


def test_keys_that_others_dropped_are_not_seen_around_a_hole() -> None:
    """Caches of transformers keep the last slots of a window, whatever these hold."""
    arguments = {"batch_size": 1, "q_length": 1, "kv_length": 4, "q_offset": 9, "kv_offset": 6}
    window = {"mask_function": masking_utils.sliding_window_causal_mask_function(4)}
    padding = torch.tensor([[1, 1, 1, 1, 1, 1, 1, 0, 1, 1]])
    mask = _mask(**arguments, **window, local_size=4, attention_mask=padding)
    assert mask.unsupported is not None
    assert "after it a sliding window sees slots before 6, with which" in mask.unsupported


@pytest.mark.parametrize("shape", [(2, 3), (2, 5), (1, 4), (2, 4, 4)])
def test_masks_of_the_wrong_width_are_marked(shape: tuple[int, ...]) -> None:
    padding = torch.ones(shape).bool()
    mask = _mask(batch_size=2, q_length=4, kv_length=4, attention_mask=padding)
    assert mask.unsupported is not None
    assert r"shape [batch, cached + new tokens] = [2, 4], got [" in mask.unsupported


def test_a_mask_is_no_tensor() -> None:
    with pytest.raises(AttributeError, match="a KeyRanges here, not a tensor with 'shape'"):
        _ = _mask(batch_size=1, q_length=1, kv_length=1).shape
