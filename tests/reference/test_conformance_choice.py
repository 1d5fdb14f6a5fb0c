# SPDX-License-Identifier: BSD-3-Clause
"""The kit's cases of chosen keys: our own merge passes, and each wrong choice fails its case."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from distributed import run_ranks
from tiers import by_world
from tree_attention import all_merge_topk, merge_topk
from tree_attention.reference.conformance import CHOICE_CASES, ChoiceProblem, check_choice

NAMES = [case.name for case in CHOICE_CASES]


def offers(problem: ChoiceProblem, rank: int) -> tuple[Tensor, Tensor]:
    """The scores of a rank's keys that are seen, and their slots or blocks."""
    scores, slots = problem.scores[rank], problem.slots[rank]
    is_seen = slots < problem.seq_lens[:, None]
    slots = torch.div(slots, problem.block, rounding_mode="floor").int()
    return scores.masked_fill(~is_seen, -torch.inf), torch.where(is_seen, slots, -1)


def best(problem: ChoiceProblem, rank: int) -> tuple[Tensor, Tensor]:
    scores, slots = offers(problem, rank)
    return merge_topk(scores[None], slots[None], topk=problem.topk)


def choose(problem: ChoiceProblem) -> Tensor:
    parts = zip(*(best(problem, rank) for rank in range(len(problem.slots))), strict=True)
    return merge_topk(*map(torch.stack, parts), topk=problem.topk)[1]


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_our_merge_passes(world_size: int) -> None:
    report = check_choice(choose, world_size=world_size)
    assert report.passed and all(line.passed for line in report.lines), str(report)


def _on_ranks(rank: int, world_size: int) -> list[bool | None]:
    def choose(problem: ChoiceProblem) -> Tensor:
        return all_merge_topk(*best(problem, rank), topk=problem.topk)[1]

    return [line.passed for line in check_choice(choose, world_size=world_size).lines]


@by_world([2], [3, 5])
def test_our_collective_passes(world_size: int) -> None:
    assert run_ranks(_on_ranks, world_size) == [[True] * len(NAMES)] * world_size


def _joined(problem: ChoiceProblem, each: Callable[..., tuple[Tensor, Tensor]] = offers) -> Any:
    parts = zip(*(each(problem, rank) for rank in range(len(problem.slots))), strict=True)
    return (torch.cat(x, dim=-1) for x in parts)


def union(problem: ChoiceProblem) -> Tensor:
    return next(iter([*_joined(problem, best)][1:]))


def first_rank(problem: ChoiceProblem) -> Tensor:
    return best(problem, 0)[1]


def a_part_of_each(problem: ChoiceProblem) -> Tensor:
    count = -(-problem.topk // len(problem.slots))
    scores, slots = _joined(problem, lambda x, rank: tuple(y[:, :count] for y in best(x, rank)))
    return merge_topk(scores[None], slots[None], topk=problem.topk)[1]


def places_for_slots(problem: ChoiceProblem) -> Tensor:
    begin, found = 0, []
    for slots in problem.slots:
        found.append(torch.arange(begin, begin + len(slots)).int())
        begin += len(slots)
    return choose(ChoiceProblem(**{**vars(problem), "slots": tuple(found)}))


def later_of_equals(problem: ChoiceProblem) -> Tensor:
    scores, slots = (x.flip(-1) for x in _joined(problem))
    slots, order = slots.sort(descending=True)
    scores, order = scores.gather(-1, order).sort(descending=True, stable=True)
    return slots.gather(-1, order)[:, : problem.topk]


def by_bits(problem: ChoiceProblem) -> Tensor:
    """Ordered bits, as a radix sort has them, of which -0 is below 0."""
    scores, slots = (x.numpy() for x in _joined(problem))
    bits = scores.view(np.int32).astype(np.int64)
    bits = np.where(bits < 0, -(bits & 0x7FFFFFFF) - 1, bits)
    order = np.lexsort((slots, -bits))[:, : problem.topk]
    return torch.from_numpy(np.take_along_axis(slots, order, 1))


def any_of_unseen(problem: ChoiceProblem) -> Tensor:
    """Numbers of keys that are not seen, where fewer than topk are."""
    found = choose(problem)
    return torch.where(found < 0, torch.arange(problem.topk).int() + 40, found)


def every_score(problem: ChoiceProblem) -> Tensor:
    return choose(ChoiceProblem(**{**vars(problem), "seq_lens": problem.seq_lens * 0 + 60}))


def repeated_blocks(problem: ChoiceProblem) -> Tensor:
    """One for each rank that has a part of it."""
    scores, slots = _joined(problem, best)
    scores, order = scores.sort(descending=True, stable=True)
    return slots.gather(-1, order)[:, : problem.topk]


def whole_blocks(problem: ChoiceProblem) -> Tensor:
    ends = problem.seq_lens // problem.block * problem.block
    return choose(ChoiceProblem(**{**vars(problem), "seq_lens": ends}))


WRONG: dict[str, tuple[Callable[[ChoiceProblem], Tensor], str]] = {
    "the union of all choices": (union, "ordinary scores"),
    "one rank's choice": (first_rank, "ordinary scores"),
    "a part of topk from each rank": (a_part_of_each, "the best keys on one rank"),
    "places in place of slots": (places_for_slots, "interleaved slots"),
    "the later of equal scores": (later_of_equals, "equal scores"),
    "scores by their bits": (by_bits, "zeros of either sign"),
    "slots for no key": (any_of_unseen, "fewer keys than topk"),
    "keys that are not seen": (every_score, "scores from seq_lens on are uninitialised"),
    "blocks several times": (repeated_blocks, "blocks that ranks share"),
    "whole blocks alone": (whole_blocks, "a partial last block"),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_mistakes_fail_their_case(mistake: str) -> None:
    function, case = WRONG[mistake]
    report = check_choice(function)
    assert case in report.failed, str(report)
    (line,) = (x for x in report.lines if x.case == case)
    assert line.meaning and not line.meaning.startswith("as in")


def test_a_union_is_named() -> None:
    (line, *others) = check_choice(union).lines
    assert "slots have the shape [4, 24], expected [4, 8]" in line.measured
    assert line.meaning.startswith("more keys than topk are chosen")
    assert {x.meaning for x in others if not x.passed} == {"as in the first case"}


def test_what_is_not_offered_raised_or_returned() -> None:
    def keys_alone(problem: ChoiceProblem) -> Tensor:
        if problem.block > 1:
            raise NotImplementedError("keys alone")
        return choose(problem)

    report = check_choice(keys_alone)
    assert report.passed
    assert [line.passed for line in report.lines[-2:]] == [None, None]

    def empty(problem: ChoiceProblem) -> Tensor:
        if any(len(x) == 0 for x in problem.slots):
            raise RuntimeError("max of an empty tensor")
        return choose(problem)

    report = check_choice(empty)
    assert report.failed == ["an empty shard"]
    assert "RuntimeError: max of an empty tensor" in str(report)
    assert "return the chosen slots alone" in str(check_choice(lambda _: (1, 2)))
    with pytest.raises(ValueError, match="check_choice: world_size must be at least 2, got 1"):
        check_choice(choose, world_size=1)


def test_numpy_arrays() -> None:
    def choose_in_numpy(problem: ChoiceProblem) -> Any:
        assert isinstance(problem.scores[0], np.ndarray)
        as_tensors = {
            "seq_lens": torch.from_numpy(problem.seq_lens),
            "scores": tuple(map(torch.from_numpy, problem.scores)),
            "slots": tuple(map(torch.from_numpy, problem.slots)),
        }
        return choose(ChoiceProblem(**{**vars(problem), **as_tensors})).numpy()

    assert check_choice(choose_in_numpy, device="numpy").passed
