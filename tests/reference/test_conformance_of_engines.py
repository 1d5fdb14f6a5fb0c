# SPDX-License-Identifier: BSD-3-Clause
"""The conformance kit on merges and masks as other engines have them, and its reports."""

import math

import pytest
import torch

from test_conformance import (
    ALL_EMPTY,
    CANCELLING,
    SAME,
    SEVERAL,
    UNEVEN,
    UNINITIALISED,
    WINDOW,
    WINDOW_OF_SEVERAL,
    attend_in_float32,
    correct_and_sum,
    merge_pairs_in_base_2,
    sharded,
    weigh_by_largest_and_sum,
)
from tree_attention import (
    merge_states,
)
from tree_attention.reference.conformance import (
    check_merge,
    check_sharded_decode,
)
from tree_attention.reference.conformance_cases import MERGE_CASES

PEERS = {
    "vLLM": (correct_and_sum, math.e, [UNINITIALISED, SAME, CANCELLING]),
    "FlashInfer": (merge_pairs_in_base_2, 2, [UNINITIALISED, ALL_EMPTY]),
    "TensorRT-LLM": (weigh_by_largest_and_sum, math.e, [UNINITIALISED, ALL_EMPTY]),
}


@pytest.mark.parametrize("num_parts", [2, 3, 8])
@pytest.mark.parametrize("peer", PEERS)
def test_merges_of_other_engines_fail_by_name(peer, num_parts):
    merge, lse_base, failed = PEERS[peer]
    report = check_merge(merge, num_parts=num_parts, lse_base=lse_base)
    assert report.failed == failed, f"\n{report}"
    meanings = {case.name: case.meaning for case in MERGE_CASES}
    assert all(line.meaning == meanings[line.case] for line in report.lines if not line.passed)


def ranges_from_the_end_of_the_shard(problem, rank):
    """The lengths of vLLM's shards, and in each of them FlashAttention's causal and window masks,
    which count from the end of the keys that they are given."""
    block = getattr(problem.layout, "block", None)
    if block is None:
        raise NotImplementedError("slots are dealt in turn")
    world_size, seqlen_q = problem.layout.world_size, problem.q.shape[2]
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


def test_base_of_a_merge_is_recognised():
    report = check_merge(merge_pairs_in_base_2)
    sentence = "natural logarithms look merged as if their base were 2"
    recognised = [line.case for line in report.lines if line.meaning == sentence]
    assert "ordinary parts" in recognised and "one part is empty" in recognised
    assert set(report.failed) - set(recognised) == {UNINITIALISED, ALL_EMPTY}
    report = check_merge(merge_states, lse_base=2)
    sentence = "logarithms to base 2 look merged as if they were natural"
    assert report.lines[0].meaning == sentence


def test_base_of_an_attention_is_recognised():
    def attend(*inputs):
        o, lse = attend_in_float32(*inputs)
        return o, lse / math.log(2)

    report = check_sharded_decode(sharded(attend))
    sentence = "logarithms to base 2 look merged as if they were natural"
    assert report.lines[0].meaning == sentence

    def merge(o_parts, lse_parts):
        o, lse = merge_states(o_parts, lse_parts)
        return o, lse / math.log(2)

    sentence = "lse looks like a logarithm to base 2: multiply it by log(2)"
    for report in (check_merge(merge), check_sharded_decode(sharded(merge=merge))):
        assert report.lines[0].meaning == sentence
    assert check_sharded_decode(sharded(merge=merge), lse_base=2).passed


def test_lines_say_what_was_measured():
    (line, *_) = check_merge(lambda o, lse: (o[0], lse[0])).lines
    assert str(line).startswith("FAILED      ordinary parts: o ")
    assert str(line).endswith(f"\n            {MERGE_CASES[0].meaning}")
    (line, *_) = check_merge(lambda o, lse: (o, lse)).lines
    shape = "o has the shape [3, 3, 8, 4, 16], expected [3, 8, 4, 16]"
    assert str(line) == f"FAILED      ordinary parts: {shape}"
    (line, *_) = check_merge(lambda o, lse: (o[0], lse)).lines
    shape = "lse has the shape [3, 3, 8, 4], expected [3, 8, 4]"
    assert str(line) == f"FAILED      ordinary parts: {shape}"
    (line, *_) = check_merge(lambda o, lse: {}["o"]).lines
    assert str(line) == "FAILED      ordinary parts: KeyError: 'o'"


def test_one_mistake_has_one_meaning():
    """A merge that is wrong in the plain case is not told what the other cases are for."""

    def merge(o_parts, lse_parts):
        o, lse = merge_states(o_parts, lse_parts)
        return 1.5 * o, lse

    report = check_merge(merge)
    shown = str(report)
    assert len(report.failed) == len(MERGE_CASES)
    assert shown.count("FAILED") == len(MERGE_CASES)
    assert [case.name for case in MERGE_CASES if case.meaning in shown] == ["ordinary parts"]
    assert shown.endswith("\nThe first case is the plain one: mend it before the others.")


def test_rounding_to_bfloat16_is_recognised():
    def merge(o_parts, lse_parts):
        o, lse = merge_states(o_parts, lse_parts)
        return o.bfloat16().float(), lse

    report = check_merge(merge)
    assert report.lines[0].meaning == (
        "o is rounded to bfloat16: merge in float32, and round once at the end"
    )
    (line, *_) = check_merge(lambda o, lse: (0 * o[0], lse[0])).lines
    assert line.meaning == MERGE_CASES[0].meaning  # zeros have no digits that were lost


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
