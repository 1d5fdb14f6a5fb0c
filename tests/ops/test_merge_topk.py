# SPDX-License-Identifier: BSD-3-Clause
"""The merge of choices of keys: one result on any tree, in any order of parts and entries."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from helpers import assert_same_bits
from tree_attention import index_topk, merge_topk, reference

NAN, INF = torch.nan, torch.inf
# So few that most tie or are named twice.
SCORES = st.sampled_from([NAN, INF, -INF, 0.0, -0.0, 1.0, -1.0, 1e-45, 3.0])
ENTRIES = st.tuples(SCORES, st.integers(-1, 12))
PARTS = st.lists(st.lists(ENTRIES, min_size=6, max_size=6), min_size=1, max_size=6)


def tensors_of(parts: list[list[tuple[float, int]]]) -> tuple[Tensor, Tensor]:
    scores = torch.tensor([[score for score, _ in part] for part in parts], dtype=torch.float32)
    slots = torch.tensor([[slot for _, slot in part] for part in parts], dtype=torch.int32)
    return scores, slots


@given(PARTS, st.integers(1, 80))
def test_merges_any_entries(parts: list[list[tuple[float, int]]], topk: int) -> None:
    scores, slots = tensors_of(parts)
    found = merge_topk(scores, slots, topk=topk)
    expected = reference.merge_topk(scores, slots, topk=topk)
    assert torch.equal(found[1], expected[1])
    assert torch.equal(found[0].nan_to_num(5.0), expected[0].nan_to_num(5.0))
    assert torch.equal(found[0].isnan(), expected[0].isnan())
    assert not (found[0].signbit() & (found[0] == 0)).any(), "-0 is 0"


@given(PARTS, st.integers(1, 6), st.randoms(use_true_random=False))
def test_any_tree_gives_the_same_bits(parts, topk, random) -> None:  # type: ignore[no-untyped-def]
    """Associative, commutative and idempotent."""
    whole = merge_topk(*tensors_of(parts), topk=topk)
    choices = [
        merge_topk(*(x[None] for x in part), topk=topk)
        for part in zip(*tensors_of(parts), strict=True)
    ]
    choices.append(random.choice(choices))
    while len(choices) > 1:
        random.shuffle(choices)
        pair = (torch.stack(x) for x in zip(choices.pop(), choices.pop(), strict=True))
        choices.append(merge_topk(*pair, topk=topk))
    assert_same_bits(choices[0], whole)
    assert_same_bits(merge_topk(*(x[None] for x in whole), topk=topk), whole)


@pytest.mark.parametrize("shape", [(3, 4), (2, 5, 6), (4, 2, 3, 1), (2, 0, 5), (1, 3, 0)])
def test_shapes_and_strides(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randint(-2, 3, shape, generator=generator).float()
    slots = torch.randint(-1, 9, shape, generator=generator).int()
    expected = reference.merge_topk(scores, slots, topk=4)
    assert expected[0].shape == (*shape[1:-1], 4)
    for strided in (lambda x: x, lambda x: x.transpose(0, -1).contiguous().transpose(0, -1)):
        found = merge_topk(strided(scores), strided(slots), topk=4)
        assert found[0].is_contiguous() and found[1].dtype == torch.int32
        assert all(map(torch.equal, found, expected))


def test_many_rows_in_parallel() -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randint(-9, 9, (3, 500, 40), generator=generator).float()
    slots = torch.randint(0, 99, (3, 500, 40), generator=generator).int()
    found = merge_topk(scores, slots, topk=50)
    for row in range(0, 500, 41):
        expected = reference.merge_topk(scores[:, row], slots[:, row], topk=50)
        assert torch.equal(found[0][row], expected[0]) and torch.equal(found[1][row], expected[1])


@pytest.mark.parametrize("block", [1, 8])
def test_choices_of_shards_are_the_choice_of_all_keys(block: int) -> None:
    """Also where a block lies on several shards and where a shard is empty, with ties."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randint(-2, 3, (2, 4, 3, 16), generator=generator).float()
    k = torch.randint(-2, 3, (2, 1, 150, 16), generator=generator).float()
    weights = torch.randint(-2, 3, (2, 4, 3), generator=generator).float()
    for topk, bounds in itertools.product((1, 10, 200), ((0, 150), (0, 3, 3, 77, 150))):
        whole = index_topk(q, k, weights, topk=topk, block=block)
        assert topk == 1 or (whole[0].diff() == 0).any(), "nothing ties"
        parts = []
        for begin, end in itertools.pairwise(bounds):
            slots = torch.arange(begin, end).int()
            part = index_topk(
                q, k[:, :, begin:end], weights, topk=topk, block=block, key_slots=slots
            )
            parts.append(part)
        merged = merge_topk(*(torch.stack(x) for x in zip(*parts, strict=True)), topk=topk)
        assert_same_bits(merged, whole)
