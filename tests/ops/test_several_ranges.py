# SPDX-License-Identifier: BSD-3-Clause
"""Queries with several ranges of keys."""

import math

import pytest
import torch

from helpers import Problem, assert_same_bits, make_problem, rounds_weights
from tree_attention import lean_decode

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("layout", ["BHSD", "BSHD", "padded"])
@pytest.mark.parametrize("page_size", [0, 1, 16])
def test_union_of_ranges(dtype, layout, page_size, device):
    """Of NaN keys that no range has, ranges that overlap, and some that are empty."""
    problem = make_problem(
        batch=3, seqlen_q=3, seqlen_k=210, ranges="several", dtype=dtype, layout=layout,
        page_size=page_size,
    )  # fmt: skip
    problem.to(device).run_and_check()


@pytest.mark.parametrize(
    "more",
    [{"alibi": 1 / 64}, {"softcap": 3.0, "softmax_scale": 0.3}, {"page_size": 16, "per_head": True},
     {"kv_dtype": torch.int8}, {"kv_dtype": torch.float8_e4m3fn, "page_size": 16}],
    ids=lambda more: " ".join(more),
)  # fmt: skip
def test_every_option(more, device):
    dtype = torch.bfloat16 if "kv_dtype" in more else torch.float32
    problem = make_problem(batch=2, seqlen_q=2, ranges="several", dtype=dtype, **more)
    problem.to(device).run_and_check()


def test_order_of_ranges_changes_no_bit(device):
    problem = make_problem(seqlen_q=2, ranges="several").to(device)
    order = problem.key_ranges[:, :, [2, 0, 1]]
    changed = Problem(problem.q, problem.k, problem.v, order)
    assert_same_bits(problem.run(num_workers=5), changed.run(num_workers=5))


def test_order_of_ranges_with_the_same_begin_changes_no_bit(device):
    problem = make_problem(seqlen_q=1).to(device)
    ranges = torch.tensor([[5, 90], [5, 20], [5, 5], [5, 20], [60, 130]], dtype=torch.int32)
    results = []
    for order in ([0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [1, 0, 4, 3, 2]):
        own = ranges[order].expand(2, 1, -1, -1).contiguous().to(device)
        results.append(Problem(problem.q, problem.k, problem.v, own).run_and_check(num_workers=3))
    for result in results[1:]:
        assert_same_bits(result, results[0])


def test_ranges_of_any_strides(device):
    problem = make_problem(batch=3, seqlen_q=2, ranges="several", alibi=1 / 64).to(device)
    expected = problem.run()
    problem.key_ranges = problem.key_ranges.permute(2, 1, 0, 3).contiguous().permute(2, 1, 0, 3)
    positions = problem.options["query_positions"]
    problem.options["query_positions"] = positions.t().contiguous().t()
    assert not problem.key_ranges.is_contiguous()
    assert not problem.options["query_positions"].is_contiguous()
    assert_same_bits(problem.run(), expected)


def test_one_range_is_a_plain_range(device):
    problem = make_problem(seqlen_q=2, ranges="random").to(device)
    listed = Problem(problem.q, problem.k, problem.v, problem.key_ranges[:, :, None])
    assert_same_bits(listed.run(num_workers=5), problem.run(num_workers=5))


def test_nothing_to_see(device):
    ranges = torch.tensor([[5, 5], [9, 3], [-4, 0]], dtype=torch.int32).expand(2, 1, -1, -1)
    for seqlen_k in (0, 20):
        problem = make_problem(seqlen_k=seqlen_k)
        o, lse = Problem(problem.q, problem.k, problem.v, ranges).to(device).run()
        assert (o == 0).all() and (lse == -math.inf).all()


def test_no_sequences_and_no_queries(device):
    for shape in ({"batch": 0}, {"seqlen_q": 0}):
        problem = make_problem(**shape)
        ranges = torch.zeros(problem.q.shape[0], problem.q.shape[2], 2, 2, dtype=torch.int32)
        o, _ = Problem(problem.q, problem.k, problem.v, ranges).to(device).run()
        assert o.shape == problem.q.shape


def test_out_of_any_strides(device):
    problem = make_problem(seqlen_q=2, ranges="several").to(device)
    expected = problem.run()
    o = torch.full((*expected[0].shape[:3], 80), math.nan, device=device)
    lse = torch.full((*expected[1].shape, 2), math.nan, device=device)
    out = o[..., 8:72], lse[..., 1]
    problem.run(out=out)
    assert_same_bits(out, expected)
    assert o[..., :8].isnan().all() and lse[..., 0].isnan().all()


def test_out_dtype(device):
    problem = make_problem(dtype=torch.bfloat16, ranges="several").to(device)
    o, lse = problem.run(out_dtype=torch.float32)
    assert o.dtype == torch.float32
    rounded, same_lse = problem.run_and_check()
    assert_same_bits((lse,), (same_lse,))
    if not rounds_weights(rounded):
        assert_same_bits((o.bfloat16(),), (rounded,))


def test_weights_have_no_more_digits_than_what_states_are_merged_to():
    problem = make_problem(dtype=torch.bfloat16, ranges="several")
    (o, _), (rounded, _) = problem.run(out_dtype=torch.float32), problem.run()
    assert torch.equal(o.bfloat16(), rounded) != rounds_weights(rounded)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda ranges: ranges[:, :, :0], "must have at least 1 range, got shape"),
        (lambda ranges: ranges[:1], r"must have shape \[batch, seqlen_q, num_ranges, 2\]"),
        (lambda ranges: ranges[..., :1], r"must have shape \[batch, seqlen_q, num_ran"),
        (lambda ranges: ranges.long(), "must be int32, got int64"),
    ],
)  # fmt: skip
def test_wrong_ranges_are_refused(change, message, device):
    problem = make_problem(ranges="several").to(device)
    with pytest.raises(ValueError, match=f"lean_decode: key_ranges {message}"):
        lean_decode(problem.q, problem.k, problem.v, change(problem.key_ranges))


def test_other_wrong_arguments_are_named_as_always(device):
    problem = make_problem(ranges="several").to(device)
    with pytest.raises(ValueError, match=r"lean_decode: k must have q's batch 2, got 1"):
        lean_decode(problem.q, problem.k[:1], problem.v[:1], problem.key_ranges)
    with pytest.raises(ValueError, match=r"q must have shape \[batch, num_heads_q, seqlen_q, he"):
        lean_decode(problem.q[0], problem.k, problem.v, problem.key_ranges)
    with pytest.raises(ValueError, match="lean_decode: o must have shape"):
        problem.run(out=tuple(torch.empty(2, 8, *x, device=device) for x in ((2, 64), (1,))))
    with pytest.raises(ValueError, match="lean_decode: o must be float32, bfloat16 or float16"):
        out = torch.empty(2, 8, 1, 64, dtype=torch.float64), torch.empty(2, 8, 1)
        problem.run(out=tuple(x.to(device) for x in out))


def test_invalid_page_is_named_with_its_sequence():
    """Each range of a query is a sequence of the call beneath."""
    q, k = torch.randn(2, 1, 1, 8), torch.randn(3, 1, 4, 8)
    table = torch.tensor([[0, 1], [2, 9]], dtype=torch.int32)
    ranges = torch.tensor([[0, 1], [2, 3], [5, 8]], dtype=torch.int32).expand(2, 1, 3, 2)
    with pytest.raises(ValueError, match=r"got 9 for page 1 of sequence 1"):
        lean_decode(q, k, k, ranges, page_table=table)
