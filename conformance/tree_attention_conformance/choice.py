# SPDX-License-Identifier: BSD-3-Clause
"""Checks of the choice of keys by their scores, over shards, in models with an index."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .arrays import default_device, to, to_numpy
from .diagnosis import Line, Report
from .truth import Floats

Integers = NDArray[Any]
BATCH, NUM_SLOTS, TOPK = 4, 60, 8
UNION = (
    "more keys than topk are chosen: the model sees the first topk of all ranks' choices together, "
    "and not every key that is among the first topk of its rank"
)


@dataclass(frozen=True)
class ChoiceProblem:
    """Scores of the keys of some sequences, one query each, split over ranks."""

    topk: int
    block: int  # with 2 or more, blocks `slot // block` are chosen, by their largest visible score
    seq_lens: Any  # int32 [batch]: a query sees the slots below
    scores: tuple[Any, ...]  # of each rank, float32 [batch, slots of the rank]
    slots: tuple[Any, ...]  # of each rank, int32 [slots of the rank]: the slots of its scores


@dataclass(frozen=True)
class ChoiceCase:
    """What the case is, what failing it means, and what makes it of ordinary scores."""

    name: str
    meaning: str
    change: Callable[[Floats, Integers], None] = lambda scores, seq_lens: None
    block: int = 1
    # The rank of each slot, of `world_size` ranks.
    owners: Callable[[Integers, int], Integers] = lambda slots, world_size: slots // 4 % world_size

    def make(self, world_size: int) -> tuple[ChoiceProblem, Integers]:
        """The problem in NumPy's arrays, and the slots or blocks of each row, ascending."""
        generator = np.random.default_rng(0)
        scores = generator.standard_normal((BATCH, NUM_SLOTS)).astype(np.float32)
        seq_lens = np.array([NUM_SLOTS, 37, 51, 22], np.int32)
        self.change(scores, seq_lens)
        slots = np.arange(NUM_SLOTS, dtype=np.int32)
        owners = self.owners(slots, world_size)
        held = tuple(slots[owners == rank] for rank in range(world_size))
        expected = [self._first(row[:end]) for row, end in zip(scores, seq_lens, strict=True)]
        shards = tuple(scores[:, own] for own in held)
        return ChoiceProblem(TOPK, self.block, seq_lens, shards, held), np.stack(expected)

    def _first(self, scores: Floats) -> Integers:
        count = -(-len(scores) // self.block)
        padded = np.full(count * self.block, -math.inf)
        padded[: len(scores)] = scores
        order = np.argsort(-padded.reshape(count, self.block).max(1), kind="stable")
        found = np.full(TOPK, -1)
        chosen = np.sort(order[:TOPK])
        found[: len(chosen)] = chosen
        return found


def _spread(scores: Floats, seq_lens: Integers) -> None:
    """All keys are seen, and the best ones lie far from each other."""
    seq_lens[:] = NUM_SLOTS
    for number, slot in enumerate((0, 20, 40, 3, 23, 43, 6, 26, 46)):
        scores[:, slot] = 20 - number


def _equal(scores: Floats, seq_lens: Integers) -> None:
    """The relu of an index makes zeros, and few keys are above them."""
    np.maximum(np.round(scores) - 1, 0, out=scores)


def _signs(scores: Floats, seq_lens: Integers) -> None:
    """A negative weight makes -0 of a 0, which is no other score."""
    _equal(scores, seq_lens)
    scores[:, ::2] = np.where(scores[:, ::2] == 0, np.float32(-0.0), scores[:, ::2])


def _few(scores: Floats, seq_lens: Integers) -> None:
    seq_lens[:] = [1, 5, TOPK, TOPK + 1]


def _uninitialised(scores: Floats, seq_lens: Integers) -> None:
    for row, end in zip(scores, seq_lens, strict=True):
        row[end:] = [(math.nan, 1e30)[i % 2] for i in range(len(row) - end)]


def _together(scores: Floats, seq_lens: Integers) -> None:
    scores[:, :4] += 20
    scores[:, 12:16] += 10


def _at_the_end(scores: Floats, seq_lens: Integers) -> None:
    for row, end in zip(scores, seq_lens, strict=True):
        row[end - 1] = 20
        row[end:] = 30


CHOICE_CASES = (
    ChoiceCase(
        "ordinary scores",
        "the first topk of all ranks' choices are not what is chosen",
        _spread,
        owners=lambda slots, world_size: slots * world_size // NUM_SLOTS,
    ),
    ChoiceCase(
        "the best keys on one rank",
        "a rank offers its first topk keys, not a part of topk: all chosen ones may be its own",
        _together,
        owners=lambda slots, world_size: np.where(slots < 20, world_size - 1, slots % world_size),
    ),
    ChoiceCase(
        "interleaved slots",
        "a rank's keys have the slots that the problem names, not those of its place in a shard",
        owners=lambda slots, world_size: slots % world_size,
    ),
    ChoiceCase(
        "an empty shard",
        "a rank without keys offers none: -1, with the score -inf",
        owners=lambda slots, world_size: slots // 4 % (world_size - 1),
    ),
    ChoiceCase(
        "equal scores",
        "of equal scores the earlier slot is chosen, whichever rank has it and whatever topk of a "
        "library does: else the choice differs with the number of ranks",
        _equal,
    ),
    ChoiceCase(
        "zeros of either sign", "-0 and 0 are one score: the earlier slot is chosen", _signs
    ),
    ChoiceCase(
        "fewer keys than topk", "all keys are chosen, and -1 stands in the other places", _few
    ),
    ChoiceCase(
        "scores from seq_lens on are uninitialised",
        "keys from seq_lens on are not seen, also where their scores are NaN or large",
        _uninitialised,
    ),
    ChoiceCase(
        "blocks that ranks share",
        "a block on several ranks has the largest of their scores, and counts once",
        block=6,
    ),
    ChoiceCase(
        "a partial last block",
        "of the last block only the slots below seq_lens count, and it can be chosen",
        _at_the_end,
        block=6,
    ),
)


def check_choice(
    function: Callable[[ChoiceProblem], Any], *, world_size: int = 3, device: str | None = None
) -> Report:
    """Checks the choice of the keys with the highest scores, of keys that are split over ranks.

    Args:
        function: takes a `ChoiceProblem`, on a rank of a real world its own shard only, and returns
            the chosen slots, or blocks, integers `[batch, topk]` in any order, -1 where there is
            none. It may raise NotImplementedError for a problem that the engine does not offer.
        device: where the scores and slots are, see `check_merge`.

    For example::

        import torch
        from tree_attention import merge_topk
        from tree_attention.reference.conformance import ChoiceProblem, check_choice

        def choose(problem: ChoiceProblem) -> torch.Tensor:
            if problem.block > 1:
                raise NotImplementedError("this engine chooses keys")
            parts = []
            for scores, slots in zip(problem.scores, problem.slots):
                is_seen = slots < problem.seq_lens[:, None]
                none = torch.full_like(scores, -torch.inf)
                parts.append((torch.where(is_seen, scores, none), torch.where(is_seen, slots, -1)))
            # One message for all ranks; with torch.distributed, all_merge_topk of each rank's part.
            scores, slots = (torch.cat(x, dim=1)[None] for x in zip(*parts))
            return merge_topk(scores, slots, topk=problem.topk)[1]

        print(check_choice(choose).passed)  # True
    """
    if world_size < 2:
        raise ValueError(f"check_choice: world_size must be at least 2, got {world_size}")
    place = to(device or default_device())

    def line(case: ChoiceCase) -> Line:
        problem, expected = case.make(world_size)
        given = replace(
            problem,
            seq_lens=place(problem.seq_lens),
            scores=tuple(map(place, problem.scores)),
            slots=tuple(map(place, problem.slots)),
        )
        try:
            found = function(given)
        except NotImplementedError as error:
            return Line(case.name, None, f"NotImplementedError: {error}", "")
        except Exception as error:
            return Line(case.name, False, f"{type(error).__name__}: {error}", case.meaning)
        return _judged(case, found, expected)

    return Report(_told_once([line(case) for case in CHOICE_CASES]))


def _judged(case: ChoiceCase, found: Any, expected: Integers) -> Line:
    if not hasattr(found, "shape"):
        text = f"a {type(found).__name__} was returned"
        return Line(case.name, False, text, "return the chosen slots alone, [batch, topk]")
    if tuple(found.shape) != expected.shape:
        is_union = tuple(found.shape[:1]) == (BATCH,) and found.shape[-1] > TOPK
        text = f"slots have the shape {list(found.shape)}, expected {list(expected.shape)}"
        return Line(case.name, False, text, UNION if is_union else "")
    rows = zip(to_numpy(found), expected, strict=True)
    wrong = sum(len({*row.tolist()} - {*right.tolist()}) for row, right in rows)
    is_right = np.array_equal(np.sort(to_numpy(found)), np.sort(expected))
    text = f"{wrong} of {(expected >= 0).sum()} are others"
    return Line(case.name, bool(is_right), text, "" if is_right else case.meaning)


def _told_once(lines: Sequence[Line]) -> tuple[Line, ...]:
    """The lines. Lines that fail together with the first case lose their own meaning."""
    first = lines[0]
    if first.passed is not False:
        return tuple(lines)
    again = [replace(x, meaning="as in the first case") if x.passed is False else x for x in lines]
    return first, *again[1:]
