# SPDX-License-Identifier: BSD-3-Clause
"""The conformance kit on merges and masks as other engines have them, and its reports."""

import math

import pytest
import torch

from test_conformance import (
    attend_in_float32,
    correct_and_sum,
    merge_pairs_in_base_2,
    sharded,
    weigh_by_largest_and_sum,
)
from test_conformance_mistakes import (
    ALL_EMPTY,
    CANCELLING,
    SAME,
    SEVERAL,
    UNEVEN,
    UNINITIALISED,
    WINDOW,
    WINDOW_OF_SEVERAL,
)
from tree_attention import merge_states
from tree_attention.reference.conformance import (
    MERGE_CASES,
    adapt,
    check_merge,
    check_sharded_decode,
)
from tree_attention.reference.conformance import diagnosis as say

PEERS = {
    "vLLM": (correct_and_sum, math.e, [UNINITIALISED, SAME, CANCELLING]),
    "FlashInfer": (merge_pairs_in_base_2, 2, [UNINITIALISED, ALL_EMPTY]),
    "TensorRT-LLM": (weigh_by_largest_and_sum, math.e, [UNINITIALISED, ALL_EMPTY]),
}


@pytest.mark.parametrize("num_parts", [2, 3, 8])
@pytest.mark.parametrize("peer", PEERS)
def test_merges_of_other_engines_fail_by_name(peer, num_parts):
    merge, lse_base, failed = PEERS[peer]
    report = check_merge(adapt(merge, lse_base=lse_base), num_parts=num_parts)
    assert report.failed == failed, f"\n{report}"
    meanings = {case.name: case.meaning for case in MERGE_CASES}
    assert all(line.meaning == meanings[line.case] for line in report.lines if not line.passed)


def ranges_from_the_end_of_the_shard(problem, rank):
    """The lengths of vLLM's shards, and in each of them FlashAttention's causal and window masks,
    which count from the end of the keys that they are given."""
    block = problem.block
    if block is None:
        raise NotImplementedError("slots are dealt in turn")
    world_size, seqlen_q = len(problem.slots), problem.q.shape[2]
    rounds = problem.seq_lens // (block * world_size) * block
    rest = problem.seq_lens - rounds * world_size
    length = rounds + (rest - rank * block).clamp(0, block)
    end = (length[:, None] - seqlen_q + 1 + torch.arange(seqlen_q)).clamp(min=0)
    begin = torch.zeros_like(end) if problem.window is None else end - problem.window
    return torch.stack([begin.clamp(min=0), end], -1).int()


def test_masks_of_other_engines_fail_by_name():
    report = check_sharded_decode(sharded(ranges=ranges_from_the_end_of_the_shard))
    assert report.failed == [SEVERAL, WINDOW, WINDOW_OF_SEVERAL], f"\n{report}"
    (line,) = (line for line in report.lines if line.passed is None)
    assert line.case == UNEVEN
    assert str(line) == (
        "not offered uneven and empty shards: NotImplementedError: slots are dealt in turn"
    )


def test_natural_merge_of_base_2_is_recognised():
    report = check_merge(adapt(merge_states, lse_base=2))
    assert report.lines[0].meaning == say.NATURAL_FOR_BASE_2


def test_base_of_an_attention_is_recognised():
    def attend(*inputs):
        o, lse = attend_in_float32(*inputs)
        return o, lse / math.log(2)

    report = check_sharded_decode(sharded(attend))
    assert report.lines[0].meaning == say.NATURAL_FOR_BASE_2

    def merge(o_parts, lse_parts):
        o, lse = merge_states(o_parts, lse_parts)
        return o, lse / math.log(2)

    assert check_sharded_decode(sharded(merge=merge)).lines[0].meaning == say.LSE_TO_BASE_2
    assert check_sharded_decode(adapt(sharded(merge=merge), lse_base=2)).passed


def test_lines_say_what_was_measured():
    (line, *_) = check_merge(lambda o, lse: (o[0], lse[0])).lines
    assert str(line).startswith("FAILED      ordinary parts: o ")
    alone = "this is part 0 alone, counted from 0: the others are left out"
    assert str(line).endswith(f"\n            {alone}")
    (line, *_) = check_merge(lambda o, lse: (o, lse)).lines
    shape = "o has the shape [3, 3, 8, 4, 16], expected [3, 8, 4, 16]"
    assert str(line) == f"FAILED      ordinary parts: {shape}\n            {say.SHAPE}"
    (line, *_) = check_merge(lambda o, lse: (o[0], lse)).lines
    shape = "lse has the shape [3, 3, 8, 4], expected [3, 8, 4]"
    assert str(line) == f"FAILED      ordinary parts: {shape}\n            {say.SHAPE}"
    (line, *_) = check_merge(lambda o, lse: {}["o"]).lines
    assert str(line) == "FAILED      ordinary parts: KeyError: 'o'"


def test_one_mistake_is_named_once():
    report = check_merge(lambda o, lse: (1.5 * o[0], lse[0]))
    shown = str(report)
    assert shown.count("FAILED") == len(report.failed) == shown.count("as in the first case") + 1
    assert shown.endswith(f"\n{len(report.failed)} of 9 cases failed: fix 'ordinary parts' first.")


def test_zeros_have_no_factor():
    (line, *_) = check_merge(lambda o, lse: (0 * o[0], lse[0])).lines
    assert line.meaning == MERGE_CASES[0].meaning


def test_nothing_offered_is_no_pass():
    def decode(problem):
        raise NotImplementedError("no shards")

    report = check_sharded_decode(decode)
    assert not report.passed and report.failed == []


def test_one_part_is_refused():
    with pytest.raises(ValueError, match="check_merge: num_parts must be at least 2, got 1"):
        check_merge(merge_states, num_parts=1)
    message = "check_sharded_decode: world_size must be at least 2, got 1"
    with pytest.raises(ValueError, match=message):
        check_sharded_decode(sharded(), world_size=1)
