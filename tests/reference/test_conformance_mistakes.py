# SPDX-License-Identifier: BSD-3-Clause
"""Mistakes that the conformance kit must tell: each fails the cases that are about it, and is named
once, by a sentence of its own.
"""

import dataclasses
import math

import numpy as np
import pytest
import torch

from helpers import INF
from test_conformance import (
    DECODE_NAMES,
    MERGE_NAMES,
    attend_in_float32,
    merge_pairs_in_base_2,
    sharded,
    weigh_by_largest_and_sum,
)
from tree_attention import lean_decode, merge_states
from tree_attention.reference.conformance import (
    DECODE_CASES,
    MERGE_CASES,
    check_merge,
    check_sharded_decode,
)
from tree_attention.reference.conformance import diagnosis as say


def plain_sum(o_parts, lse_parts):
    """Without the largest lse subtracted."""
    exponentials = lse_parts.exp()
    total = exponentials.sum(0)
    weights = (exponentials / total.masked_fill(lse_parts.amax(0) == -INF, 1))[..., None]
    o = torch.where(weights == 0, 0, weights * o_parts.float()).sum(0)
    return o.to(o_parts.dtype), total.log()


def hide_nan(o_parts, lse_parts):
    return merge_states(o_parts.nan_to_num(), lse_parts.nan_to_num(nan=-INF, neginf=-INF))


def multiply_empty(o_parts, lse_parts):
    """Parts without keys get a weight of 0 and are not left out."""
    weights = lse_parts.softmax(0).nan_to_num()[..., None]
    return (weights * o_parts.float()).sum(0).to(o_parts.dtype), lse_parts.logsumexp(0)


def finite_for_empty(o_parts, lse_parts):
    """-10,000 as if it were -inf."""
    return merge_states(o_parts, lse_parts.masked_fill(lse_parts == -INF, -1e4))


def weigh_rounded(o_parts, lse_parts):
    """The merge in the dtype of o."""
    weights = lse_parts.softmax(0).nan_to_num().to(o_parts.dtype)[..., None]
    selected = o_parts.masked_fill(lse_parts[..., None] == -INF, 0)
    return (weights * selected).sum(0), lse_parts.logsumexp(0)


def weigh_by_lse(o_parts, lse_parts):
    """Without a division by the sum of the weights."""
    lse = lse_parts.logsumexp(0)
    weights = (lse_parts - lse).exp().masked_fill(lse_parts == -INF, 0)[..., None]
    selected = o_parts.float().masked_fill(lse_parts[..., None] == -INF, 0)
    return (weights * selected).sum(0).to(o_parts.dtype), lse


def after_merge(change):
    """A right merge, and a change of its result."""
    return lambda o_parts, lse_parts: change(*merge_states(o_parts, lse_parts))


def after_merge_of_parts(change):
    """A right merge, but for an lse made of the parts' and of the right one."""

    def merge(o_parts, lse_parts):
        o, lse = merge_states(o_parts, lse_parts)
        changed = change(lse_parts, lse)
        return o, torch.where(changed.isfinite(), changed, lse)

    return merge


def without_strides(x):
    return x.as_strided(x.shape, torch.empty(x.shape, device="meta").stride())


UNINITIALISED = "o of an empty part is uninitialised"
ALL_EMPTY = "all parts are empty"
CANCELLING = "16-bit parts that cancel"
SAME = "equal parts with lse of 1e6 and 1e30"
FAR = "lse near 200 and -200"
NAN_PART = "NaN in one row of one part"
VIEWS = "views with strides"
MEANING = {case.name: case.meaning for case in (*MERGE_CASES, *DECODE_CASES)}
WRONG_MERGES = {  # the function, the cases that it fails, and what is said of it
    "plain sum": (plain_sum, [FAR, SAME], MEANING[FAR]),
    "not divided": (weigh_by_lse, [SAME], MEANING[SAME]),
    "hidden NaN": (hide_nan, [NAN_PART], MEANING[NAN_PART]),
    "multiplied": (multiply_empty, [UNINITIALISED], MEANING[UNINITIALISED]),
    "NaN for no keys": (
        weigh_by_largest_and_sum,
        [UNINITIALISED, ALL_EMPTY],
        MEANING[UNINITIALISED],
        MEANING[ALL_EMPTY],
    ),
    "finite": (finite_for_empty, [UNINITIALISED, ALL_EMPTY], say.STAND_IN.format(-1e4)),
    "sums rounded": (weigh_rounded, [CANCELLING], MEANING[CANCELLING]),
    "strides": (
        lambda o, lse: merge_states(without_strides(o), without_strides(lse)),
        [VIEWS],
        MEANING[VIEWS],
    ),
    "mean": (
        lambda o, lse: (o.float().mean(0).to(o.dtype), lse.logsumexp(0)),
        [name for name in MERGE_NAMES if name != SAME],
        say.EQUAL,
    ),
    "weights of squares": (
        lambda o, lse: (merge_states(o, 2 * lse)[0], lse.logsumexp(0)),
        [name for name in MERGE_NAMES if name != SAME],
        say.O_ALONE,
    ),
    "weights and lse of squares": (
        lambda o, lse: merge_states(o, 2 * lse),
        MERGE_NAMES,
        MEANING["ordinary parts"],
    ),
    "reverse order": (
        lambda o, lse: merge_states(o, lse.flip(0)),
        [name for name in MERGE_NAMES if name != SAME],
        say.ORDER.format("2, 1, 0"),
    ),
    "order of neighbours": (
        lambda o, lse: merge_states(o, lse.roll(1, 0)),
        [name for name in MERGE_NAMES if name != SAME],
        say.ORDER.format("2, 0, 1"),
    ),
    "weights of the other sign": (
        lambda o, lse: (merge_states(o, -lse)[0], merge_states(o, lse)[1]),
        [name for name in MERGE_NAMES if name != SAME],
        say.INVERTED,
    ),
    "last part left out": (
        lambda o, lse: merge_states(o[:-1], lse[:-1]),
        [name for name in MERGE_NAMES if name != SAME],
        say.LEFT_OUT.format(2),
    ),
    "own part merged twice": (
        lambda o, lse: merge_states(o[[0, 1, 2, 1]], lse[[0, 1, 2, 1]]),
        [name for name in MERGE_NAMES if name != SAME],
        say.TWICE.format(1),
    ),
    "first part alone": (
        lambda o, lse: (o[0], lse[0]),
        MERGE_NAMES,
        say.ALONE.format(0),
    ),
    "minus of the logarithm": (
        after_merge_of_parts(lambda parts, lse: 2 * parts.amax(0) - lse),
        MERGE_NAMES,
        say.SIGN,
    ),
    "largest lse": (
        after_merge_of_parts(lambda parts, lse: parts.amax(0)),
        MERGE_NAMES,
        say.LARGEST,
    ),
    "half an lse": (
        after_merge(lambda o, lse: (o, lse.abs().sqrt())),
        MERGE_NAMES,
        say.LSE_ALONE,
    ),
    "nothing returned": (lambda o, lse: None, MERGE_NAMES, say.NO_STATE),
    "scaled": (after_merge(lambda o, lse: (1.5 * o, lse)), MERGE_NAMES, say.SCALED.format(1.5)),
    "rounded": (
        after_merge(lambda o, lse: (o.bfloat16().float(), lse)),
        [name for name in MERGE_NAMES if name not in (SAME, CANCELLING)],
        say.IN_16_BITS,
    ),
    "base 2": (
        merge_pairs_in_base_2,
        [name for name in MERGE_NAMES if name != SAME],
        say.BASE_2_FOR_NATURAL,
    ),
    "lse to base 2": (
        after_merge(lambda o, lse: (o, lse / math.log(2))),
        MERGE_NAMES,
        say.LSE_TO_BASE_2,
    ),
    "lse of a mean": (
        after_merge(lambda o, lse: (o, lse - math.log(3))),
        MERGE_NAMES,
        say.SHIFTED.format(-math.log(3)),
    ),
    "axes": (lambda o, lse: (o[0].transpose(1, 2), lse[0]), MERGE_NAMES, say.SHAPE),
    "error": (lambda o, lse: o @ lse, MERGE_NAMES),
}


def assert_told(report, failed, *sentences):
    """The report has these failures and says these sentences, each once."""
    assert not report.passed and report.failed == failed, f"\n{report}"
    said = [line.meaning for line in report.lines if line.meaning]
    assert tuple(x for x in said if not x.startswith("as in ")) == sentences, f"\n{report}"


@pytest.mark.parametrize("fault", WRONG_MERGES)
def test_wrong_merges_are_told_once(fault):
    merge, *expected = WRONG_MERGES[fault]
    assert_told(check_merge(merge), *expected)


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (lambda o: None, "None"),
        (lambda o: (None, o), "None"),
        (lambda o: (o, 1.5), "a float"),
        (lambda o: (o, o, o), "a tuple of 3"),
        (lambda o: {"o": o}, "a dict"),
    ],
)
def test_what_is_no_state_is_named(result, words):
    report = check_merge(lambda o_parts, lse_parts: result(o_parts[0]))
    assert_told(report, MERGE_NAMES, say.NO_STATE)
    assert {line.measured for line in report.lines} == {f"{words} was returned"}


def numpy_merge(o_parts, lse_parts):
    """Of arrays, which tensors of bfloat16 do not become."""
    o, lse = (torch.from_numpy(np.asarray(x)) for x in (o_parts, lse_parts))
    o, lse = merge_states(o, lse)
    return o.numpy(), lse.numpy()


def test_a_function_of_numpy_is_told_how_to_get_arrays():
    report = check_merge(numpy_merge, device="cpu")
    assert_told(report, ["16-bit parts that cancel"], say.FOR_NUMPY)
    assert check_merge(numpy_merge, device="numpy").passed


def test_an_exception_of_another_kind_is_not_as_in_the_first_case():
    def merge(o_parts, lse_parts):
        return numpy_merge(2 * o_parts, lse_parts)

    said = {line.case: line.meaning for line in check_merge(merge, device="cpu").lines}
    assert said.pop("16-bit parts that cancel") == say.FOR_NUMPY
    first, *others = said.values()
    assert first == say.SCALED.format(2) and "as in the first case" in others

    def raising(o_parts, lse_parts):
        raise OverflowError if o_parts.dtype == torch.bfloat16 else ZeroDivisionError

    said = {line.case: line.meaning for line in check_merge(raising, device="cpu").lines}
    assert said.pop("16-bit parts that cancel") == ""
    assert [*said.values()] == ["", *["as in the first case"] * (len(MERGE_CASES) - 2)]


def plain_attention(q, k, v, key_ranges, *, first=None):
    """All scores at once; a key outside of the ranges has the weight 0, and its value is read.

    first: what stands for the largest score.
    """
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1).float() for x in (k, v))
    slots = torch.arange(k.shape[2])
    seen = ((slots >= key_ranges[..., :1]) & (slots < key_ranges[..., 1:]))[:, None]
    scores = (q.float() @ k.mT * q.shape[3] ** -0.5).masked_fill(~seen, -INF)
    if first is None:
        first = scores.logsumexp(-1, keepdim=True)
        first = first.masked_fill(first == -INF, 0)
    weights = (scores - first).exp()
    sums = weights.sum(-1, keepdim=True)
    return weights @ v / sums.masked_fill(sums == 0, 1), (sums.log() + first).squeeze(-1)


def attend_with_heads_in_turn(q, k, v, key_ranges):
    k, v = (x.repeat(1, q.shape[1] // x.shape[1], 1, 1) for x in (k, v))
    return lean_decode(q, k, v, key_ranges, out_dtype=torch.float32)


def as_if_dealt_singly(problem, rank):
    slots = problem.bounds[-1]
    dealt = tuple(torch.arange(r, slots, len(problem.slots)) for r in range(len(problem.slots)))
    return dataclasses.replace(problem, slots=dealt).key_ranges(rank)


def as_if_even(problem, rank):
    """The shards are taken to be as long as an even deal would make them."""
    return torch.stack([(x + 2) // 3 for x in problem.key_ranges().unbind(-1)], -1)


def of_ranks_in_reverse(problem, rank):
    return problem.key_ranges(len(problem.slots) - 1 - rank)


def as_the_last_query(problem, rank):
    """All query tokens see what the last one does."""
    return problem.key_ranges(rank)[:, -1:].repeat(1, problem.q.shape[2], 1)


def with_ends(shift):
    """The keys of every query end so many slots later."""

    def ranges(problem, rank):
        seq_lens = torch.as_tensor(problem.seq_lens) + shift
        return dataclasses.replace(problem, seq_lens=seq_lens).key_ranges(rank)

    return ranges


def without_window(problem, rank):
    return dataclasses.replace(problem, window=None).key_ranges(rank)


def without_largest(q, k, v, key_ranges):
    slots = torch.arange(k.shape[2])
    behind = (slots >= key_ranges[..., 1].amax(1)[:, None])[:, None, :, None]
    return plain_attention(q, k, v.masked_fill(behind, 0), key_ranges, first=0.0)


def with_lse_of_no_keys(value):
    def attend(*inputs):
        o, lse = attend_in_float32(*inputs)
        return o, lse.masked_fill(lse == -INF, value)

    return attend


def plain_merge(o_parts, lse_parts):
    """Weights of 0 are left out, so that what an lse of +inf makes NaN is."""
    lse = lse_parts.logsumexp(0)
    return ((lse_parts - lse).exp()[..., None] * o_parts).sum(0), lse


def attend_to_few(q, k, v, key_ranges):
    return attend_in_float32(q, k[:, :, :4096], v[:, :, :4096], key_ranges)


def attend_without_strides(q, k, v, key_ranges):
    return attend_in_float32(*map(without_strides, (q, k, v)), key_ranges)


SCORES = "scores near 2,000 and -2,000"
SEVERAL = "several query tokens"
WINDOW = "a sliding window"
WINDOW_OF_SEVERAL = "a sliding window of several query tokens"
BLOCKS = "blocks of 16 slots"
LENGTHS = "lengths of 1, 700 and 20,000"
CANCEL = "16-bit shards that cancel"
BEHIND = "NaN behind the last token"
ONE_RANK = "sequences with keys on one rank only"
NO_KEYS = "a sequence without keys"
UNEVEN = "uneven and empty shards"
WRONG_DECODES = {
    "values read": (sharded(plain_attention), [BEHIND], MEANING[BEHIND]),
    "largest score": (sharded(without_largest), [SCORES], MEANING[SCORES]),
    "few keys": (sharded(attend_to_few), [LENGTHS], MEANING[LENGTHS]),
    "last query": (
        sharded(ranges=as_the_last_query),
        [SEVERAL, WINDOW_OF_SEVERAL],
        MEANING[SEVERAL],
    ),
    "no window": (
        sharded(ranges=without_window),
        [WINDOW, WINDOW_OF_SEVERAL],
        MEANING[WINDOW],
    ),
    "rounded states": (sharded(lean_decode), [CANCEL], MEANING[CANCEL]),
    "NaN for no keys": (sharded(merge=weigh_by_largest_and_sum), [NO_KEYS], MEANING[NO_KEYS]),
    "strides": (sharded(attend_without_strides), [VIEWS], MEANING[VIEWS]),
    "single slots": (
        sharded(ranges=as_if_dealt_singly),
        [BLOCKS, UNEVEN, ONE_RANK, WINDOW_OF_SEVERAL, LENGTHS],
        MEANING[BLOCKS],
    ),
    "ranks in reverse": (
        sharded(ranges=of_ranks_in_reverse),
        [name for name in DECODE_NAMES if name != CANCEL],
        MEANING["one query token"],
    ),
    "a slot too many": (
        sharded(ranges=with_ends(1)),
        DECODE_NAMES,
        say.ONE_MORE,
    ),
    "a slot too few": (
        sharded(ranges=with_ends(-1)),
        DECODE_NAMES,
        say.ONE_LESS,
    ),
    "no scale": (
        sharded(lambda q, k, v, seen: lean_decode(8 * q, k, v, seen, out_dtype=torch.float32)),
        [name for name in DECODE_NAMES if name != CANCEL],
        say.NO_SCALE,
    ),
    "scaled by head_dim": (
        sharded(lambda q, k, v, seen: lean_decode(q / 8, k, v, seen, out_dtype=torch.float32)),
        [name for name in DECODE_NAMES if name != CANCEL],
        say.SCALE_TWICE,
    ),
    "heads in turn": (
        sharded(attend_with_heads_in_turn),
        DECODE_NAMES,
        say.HEADS_IN_TURN,
    ),
    "lse of no keys is 0": (
        sharded(with_lse_of_no_keys(0.0)),
        [UNEVEN, ONE_RANK, NO_KEYS, SEVERAL, WINDOW_OF_SEVERAL, LENGTHS],
        say.STAND_IN.format(0.0),
    ),
    "lse of no keys is +inf": (
        sharded(with_lse_of_no_keys(INF), merge=plain_merge),
        [UNEVEN, ONE_RANK, NO_KEYS, SEVERAL, WINDOW_OF_SEVERAL, LENGTHS],
        say.STAND_IN.format(INF),
    ),
    "scaled": (
        sharded(merge=after_merge(lambda o, lse: (2 * o, lse))),
        DECODE_NAMES,
        say.SCALED.format(2.0),
    ),
}


@pytest.mark.parametrize("fault", WRONG_DECODES)
def test_wrong_decodes_are_told_once(fault):
    decode, *expected = WRONG_DECODES[fault]
    assert_told(check_sharded_decode(decode), *expected)


def test_shards_that_are_taken_to_be_even_show_a_slot_too_many():
    report = check_sharded_decode(sharded(ranges=as_if_even))
    assert report.lines[0].meaning == say.ONE_MORE


def test_every_case_can_fail():
    for faults, names in ((WRONG_MERGES, MERGE_NAMES), (WRONG_DECODES, DECODE_NAMES)):
        failed = [failed for _, failed, *_ in faults.values() if failed != names]
        assert set().union(*failed) == set(names)


def test_each_mistake_has_its_own_sentence():
    for faults in (WRONG_MERGES, WRONG_DECODES):
        sentences = [said[0] for _, _, *said in faults.values() if len(said) == 1]
        assert len(sentences) == len(set(sentences)) >= 12
