# SPDX-License-Identifier: BSD-3-Clause
"""The conformance kit: our own functions pass it, and wrong ones fail by the names of their faults.

Each wrong function is what one case is for, or a formula of another engine, restated in PyTorch.
"""

import dataclasses
from functools import partial

import pytest
import torch

from benchmarks.papers.algorithms import tree
from distributed import run_ranks
from helpers import INF
from tiers import by_world
from tree_attention import (
    BlockCyclic,
    all_merge_states,
    lean_decode,
    merge_states,
    reference,
    tree_decode,
)
from tree_attention.reference.conformance import (
    DecodeProblem,
    check_merge,
    check_sharded_decode,
)
from tree_attention.reference.conformance_cases import DECODE_CASES, MERGE_CASES

OP = "merge_states"
MERGE_NAMES = [case.name for case in MERGE_CASES]
DECODE_NAMES = [case.name for case in DECODE_CASES]


def lines(report, passed):
    return [line.case for line in report.lines if line.passed is passed]


def attend_in_float32(q, k, v, key_ranges):
    return lean_decode(q, k, v, key_ranges, out_dtype=torch.float32)


def sharded(attend=attend_in_float32, merge=merge_states, ranges=DecodeProblem.key_ranges):
    """A decode of all shards in one process: `attend` to each, then `merge` the states."""

    def decode(problem):
        states = [
            attend(problem.q, k, v, ranges(problem, rank))
            for rank, (k, v) in enumerate(zip(problem.k_shards, problem.v_shards, strict=True))
        ]
        o, lse = merge(*(torch.stack(parts) for parts in zip(*states, strict=True)))
        return o.to(problem.q.dtype), lse

    return decode


# Our own functions.


@pytest.mark.parametrize("num_parts", [2, 3, 5, 8])
def test_merge_states_conforms(num_parts, device):
    report = check_merge(merge_states, num_parts=num_parts, device=device)
    assert report.passed and lines(report, True) == MERGE_NAMES, f"\n{report}"


def test_float64_merge_conforms():
    report = check_merge(reference.merge_states)
    assert report.passed and lines(report, True) == MERGE_NAMES, f"\n{report}"


def conform(rank, world_size):
    """Every rank merges its own of the parts, and attends to its own of the shards."""

    def merge(o_parts, lse_parts):
        return all_merge_states(o_parts[rank], lse_parts[rank])

    def decode(problem):
        k, v = problem.k_shards[rank], problem.v_shards[rank]
        return tree_decode(problem.q, k, v, problem.key_ranges(rank))

    report = check_merge(merge, num_parts=world_size)
    assert report.passed and lines(report, True) == MERGE_NAMES, f"\n{report}"
    for dtype in (torch.float32, torch.bfloat16):
        report = check_sharded_decode(decode, world_size=world_size, dtype=dtype)
        assert report.passed and lines(report, True) == DECODE_NAMES, f"\n{report}"


@by_world([3], [2])
def test_ranks_conform(world_size):
    run_ranks(conform, world_size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("world_size", [2, 5])
def test_lean_decode_of_shards_conforms(world_size, dtype):
    report = check_sharded_decode(sharded(), world_size=world_size, dtype=dtype)
    assert report.passed and lines(report, True) == DECODE_NAMES, f"\n{report}"


def test_sharded_reference_conforms():
    def decode(problem):
        ranges = [problem.key_ranges(rank) for rank in range(len(problem.k_shards))]
        shards = zip(problem.k_shards, problem.v_shards, ranges, strict=True)
        return tree.tree_attention(problem.q, [tree.Shard(*shard) for shard in shards])

    report = check_sharded_decode(decode)
    assert report.passed and lines(report, True) == DECODE_NAMES, f"\n{report}"


# Formulas of other engines.


def correct_and_sum(o_parts, lse_parts):
    """vLLM's correct_attn_out on every rank and the sum behind it: each rank multiplies its o by
    exp(lse_rank - lse), and products and sums have o's dtype. NaN and +inf are taken as empty."""
    clean = lse_parts.masked_fill(lse_parts.isnan() | (lse_parts == INF), -INF)
    largest = clean.amax(0)
    largest = largest.masked_fill(largest == -INF, 0)
    lse = (clean - largest).exp().sum(0).log() + largest
    exponents = lse_parts - lse
    exponents = exponents.masked_fill(exponents.isnan() | (exponents == INF), -INF)
    o = torch.zeros_like(o_parts[0])
    for part, weight in zip(o_parts, exponents.exp()[..., None], strict=True):
        o = o + (part * weight).to(o_parts.dtype)
    return o, lse


def merge_pairs_in_base_2(o_parts, lse_parts):
    """FlashInfer's merge_state, one part after the other, in float32 until the last."""
    o, lse = o_parts[0].float(), lse_parts[0]
    for o_part, lse_part in zip(o_parts[1:], lse_parts[1:], strict=True):
        largest = torch.maximum(lse, lse_part)
        a, b = torch.exp2(lse - largest), torch.exp2(lse_part - largest)
        o = (a / (a + b))[..., None] * o + (b / (a + b))[..., None] * o_part
        lse = torch.log2(a + b) + largest
    return o.to(o_parts.dtype), lse


def weigh_by_largest_and_sum(o_parts, lse_parts):
    """TensorRT-LLM's post-processing of Helix: the statistics of a part are its largest score and
    its sum of exponentials, for which (lse, 1) stands here. It returns no lse."""
    largest, sums = lse_parts, torch.ones_like(lse_parts)
    weights = sums * (largest - largest.amax(0)).exp()
    weights = weights / weights.sum(0)
    return (weights[..., None] * o_parts.float()).sum(0).to(o_parts.dtype), None


# Wrong functions. Together they fail every case, and a fault fails the cases that are about it.


def plain_sum(o_parts, lse_parts):
    """Without the largest lse subtracted."""
    exponentials = lse_parts.exp()
    weights = (exponentials / exponentials.sum(0))[..., None]
    o = torch.where(weights == 0, 0, weights * o_parts.float()).sum(0)
    return o.to(o_parts.dtype), exponentials.sum(0).log()


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


def without_strides(x):
    return x.as_strided(x.shape, torch.empty(x.shape, device="meta").stride())


UNINITIALISED = "o of an empty part is uninitialised"
ALL_EMPTY = "all parts are empty"
CANCELLING = "bfloat16 parts that cancel"
SAME = "equal parts with lse of 1e6 and 1e30"
FAR = "lse near 200 and -200"
NAN_PART = "NaN in one row of one part"
VIEWS = "views with strides"
WRONG_MERGES = {
    "plain sum": (plain_sum, [ALL_EMPTY, FAR, SAME]),
    "hidden NaN": (hide_nan, [NAN_PART]),
    "multiplied": (multiply_empty, [UNINITIALISED]),
    "finite": (finite_for_empty, [UNINITIALISED, ALL_EMPTY]),
    "rounded": (weigh_rounded, [CANCELLING]),
    "strides": (lambda o, lse: merge_states(without_strides(o), without_strides(lse)), [VIEWS]),
    "mean": (
        lambda o, lse: (o.float().mean(0).to(o.dtype), lse.logsumexp(0)),
        [name for name in MERGE_NAMES if name != SAME],
    ),
    "shape": (lambda o, lse: (o, lse), MERGE_NAMES),
    "error": (lambda o, lse: o @ lse, MERGE_NAMES),
}


@pytest.mark.parametrize("fault", WRONG_MERGES)
def test_wrong_merges_fail_by_name(fault):
    merge, failed = WRONG_MERGES[fault]
    report = check_merge(merge)
    assert not report.passed and report.failed == failed, f"\n{report}"


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


def as_if_dealt_singly(problem, rank):
    layout = BlockCyclic(problem.layout.world_size, 1)
    return dataclasses.replace(problem, layout=layout).key_ranges(rank)


def as_if_even(problem, rank):
    """The shards are taken to be as long as an even deal would make them."""
    return torch.stack([(x + 2) // 3 for x in problem.key_ranges().unbind(-1)], -1)


def as_the_last_query(problem, rank):
    """All query tokens see what the last one does."""
    return problem.key_ranges(rank)[:, -1:].repeat(1, problem.q.shape[2], 1)


def without_window(problem, rank):
    return dataclasses.replace(problem, window=None).key_ranges(rank)


def attend_to_few(q, k, v, key_ranges):
    return attend_in_float32(q, k[:, :, :4096], v[:, :, :4096], key_ranges)


def attend_without_strides(q, k, v, key_ranges):
    return attend_in_float32(*map(without_strides, (q, k, v)), key_ranges)


SEVERAL = "several query tokens"
WINDOW = "a sliding window"
WINDOW_OF_SEVERAL = "a sliding window of several query tokens"
BLOCKS = "blocks of 16 slots"
LENGTHS = "lengths of 1, 700 and 20,000"
CANCEL = "bfloat16 shards that cancel"
BEHIND = "NaN behind the last token"
ONE_RANK = "sequences with keys on one rank only"
NO_KEYS = "a sequence without keys"
UNEVEN = "uneven and empty shards"
WRONG_DECODES = {
    "values read": (sharded(plain_attention), [BEHIND]),
    "largest score": (
        sharded(partial(plain_attention, first=0.0)),
        ["scores near 2,000 and -2,000", BEHIND],
    ),
    "few keys": (sharded(attend_to_few), [LENGTHS]),
    "last query": (sharded(ranges=as_the_last_query), [SEVERAL, WINDOW_OF_SEVERAL]),
    "no window": (sharded(ranges=without_window), [WINDOW, WINDOW_OF_SEVERAL]),
    "rounded states": (sharded(lean_decode), [CANCEL]),
    "NaN for no keys": (sharded(merge=weigh_by_largest_and_sum), [NO_KEYS]),
    "strides": (sharded(attend_without_strides), [VIEWS]),
    "single slots": (
        sharded(ranges=as_if_dealt_singly),
        [BLOCKS, UNEVEN, ONE_RANK, WINDOW_OF_SEVERAL, LENGTHS],
    ),
    "even shards": (
        sharded(ranges=as_if_even),
        [name for name in DECODE_NAMES if name not in (NO_KEYS, CANCEL)],
    ),
}


@pytest.mark.parametrize("fault", WRONG_DECODES)
def test_wrong_decodes_fail_by_name(fault):
    decode, failed = WRONG_DECODES[fault]
    report = check_sharded_decode(decode)
    assert not report.passed and report.failed == failed, f"\n{report}"


def test_every_case_can_fail():
    for faults, names in ((WRONG_MERGES, MERGE_NAMES), (WRONG_DECODES, DECODE_NAMES)):
        failed = [failed for _, failed in faults.values() if failed != names]
        assert set().union(*failed) == set(names)


# What the formulas of other engines fail.


# Logarithms of the wrong base.


# The report.
