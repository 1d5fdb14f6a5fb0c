# SPDX-License-Identifier: BSD-3-Clause
"""The conformance kit: our own functions pass it, and wrong ones fail by the names of their faults.

Each wrong function is what one case is for, or a formula of another engine, restated in PyTorch.
"""

import pytest
import torch

from distributed import run_ranks
from helpers import INF
from tiers import by_world, tiers
from tree_attention import (
    all_merge_states,
    lean_decode,
    merge_states,
    reference,
    tree_decode,
)
from tree_attention.reference.conformance import (
    DECODE_CASES,
    MERGE_CASES,
    DecodeProblem,
    check_merge,
    check_sharded_decode,
)

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


def conform(rank, world_size, dtype):
    """Every rank merges its own of the parts, and attends to its own of the shards."""

    def merge(o_parts, lse_parts):
        return all_merge_states(o_parts[rank], lse_parts[rank])

    def decode(problem):
        k, v = problem.k_shards[rank], problem.v_shards[rank]
        return tree_decode(problem.q, k, v, problem.key_ranges(rank))

    report = check_merge(merge, num_parts=world_size)
    assert report.passed and lines(report, True) == MERGE_NAMES, f"\n{report}"
    report = check_sharded_decode(decode, world_size=world_size, dtype=dtype)
    assert report.passed and lines(report, True) == DECODE_NAMES, f"\n{report}"


@pytest.mark.parametrize(
    "world_size, dtype", tiers([(3, "bfloat16")], [(3, "float32"), (2, "bfloat16")])
)
def test_ranks_conform(world_size, dtype):
    run_ranks(conform, world_size, dtype)


@pytest.mark.parametrize("dtype", tiers(["float32"], ["bfloat16"]))
@by_world([2], [5])
def test_lean_decode_of_shards_conforms(world_size, dtype):
    report = check_sharded_decode(sharded(), world_size=world_size, dtype=dtype)
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
