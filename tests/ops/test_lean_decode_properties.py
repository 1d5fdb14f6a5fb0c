# SPDX-License-Identifier: BSD-3-Clause
"""What holds of lean_decode for every problem."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from helpers import Problem, assert_same_bits, make_problem
from tree_attention import lean_decode, merge_states
from tree_attention.sharding import BlockCyclic, Contiguous, ContiguousThenCyclic

KINDS = ["all", "ragged", "left padded", "causal", "window", "random", "several"]


@st.composite
def problems(draw, paged=True, min_seqlen_k=0) -> Problem:
    torch.manual_seed(draw(st.integers(0, 2**31)))
    page_size = draw(st.integers(1, 70)) if paged and draw(st.booleans()) else 0
    return make_problem(
        batch=draw(st.integers(1, 3)),
        num_heads_kv=draw(st.integers(1, 3)),
        group_size=draw(st.sampled_from([1, 2, 3, 4, 5, 7, 8])),
        seqlen_q=draw(st.integers(1, 5)),
        seqlen_k=draw(st.one_of(st.integers(min_seqlen_k, 200), st.sampled_from([64, 65, 512]))),
        head_dim=draw(st.sampled_from([1, 8, 33, 64, 80, 128])),
        head_dim_v=draw(st.sampled_from([None, 16, 37, 64])),
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16])),
        ranges=draw(st.sampled_from(KINDS)),
        layout=draw(st.sampled_from(["BHSD", "BSHD", "padded", "unaligned"])),
        page_size=page_size,
        per_head=bool(page_size) and draw(st.booleans()),
        alibi=draw(st.sampled_from([0.0, 1 / 64])),
        softcap=draw(st.sampled_from([0.0, 0.0, 3.0, 50.0])),
        softmax_scale=draw(st.sampled_from([None, None, 0.05, 0.3])),
    )


@settings(max_examples=150)
@given(problems(), st.integers(0, 40))
def test_any_problem_with_any_workers(problem, num_workers):
    result = problem.run_and_check(num_workers=num_workers)
    if num_workers:
        assert_same_bits(result, problem.run(num_workers=num_workers))


@st.composite
def sharded_problems(draw):
    problem = draw(problems(paged=False, min_seqlen_k=1))
    seqlen_k = problem.k.shape[2]
    cuts = sorted(draw(st.lists(st.integers(0, seqlen_k), max_size=6)))
    layouts = [
        st.builds(BlockCyclic, st.integers(1, 8), st.sampled_from([1, 3, 16, 64])),
        st.just(Contiguous([0, *cuts, seqlen_k])),
    ]
    if "alibi_slopes" in problem.options:
        problem.options["key_layout"] = (0, 1, 1)
    else:
        layouts.append(st.just(ContiguousThenCyclic([0, *cuts], 5) if cuts else BlockCyclic(1)))
    return problem, draw(st.one_of(layouts))


def merged(problem: Problem, layout, **extra):
    states = [
        problem.shard(layout, rank).run(out_dtype=torch.float32, **extra)
        for rank in range(layout.world_size)
    ]
    parts = (torch.stack(x) for x in zip(*states, strict=True))
    return merge_states(*parts, out_dtype=problem.q.dtype)


@settings(max_examples=100)
@given(sharded_problems(), st.sampled_from([0, 1, 3]))
def test_any_sharding_equals_the_whole(sharded, num_workers):
    """For any cut and any layout, empty shards among them, lse included."""
    problem, layout = sharded
    problem.check(*merged(problem, layout, num_workers=num_workers))


@pytest.mark.deep
@given(sharded_problems())
def test_one_shard_is_the_local_kernel(sharded):
    problem, _ = sharded
    o, lse = problem.run(out_dtype=torch.float32)
    assert_same_bits(merged(problem, BlockCyclic(1)), (o.to(problem.q.dtype), lse))


small = {
    "seed": st.integers(0, 2**31),
    "seqlen_k": st.integers(1, 200),
    "num_workers": st.integers(1, 4),
}


def plain_problem(seed: int, seqlen_k: int, **shape) -> Problem:
    torch.manual_seed(seed)
    return make_problem(batch=2, group_size=3, seqlen_k=seqlen_k, head_dim=32, **shape)


@settings(max_examples=25)
@given(**small)
def test_order_of_keys_does_not_matter(seed, seqlen_k, num_workers):
    problem = plain_problem(seed, seqlen_k)
    order = torch.randperm(seqlen_k)
    o, lse = lean_decode(
        problem.q, problem.k[:, :, order], problem.v[:, :, order], num_workers=num_workers
    )
    problem.check(o, lse)


@settings(max_examples=25)
@given(**small)
def test_order_of_queries_is_kept_in_bits(seed, seqlen_k, num_workers):
    """Rows are independent: permuted queries, ranges and all, give permuted results."""
    problem = plain_problem(seed, seqlen_k, seqlen_q=4)
    order = torch.randperm(4)
    o, lse = problem.run(num_workers=num_workers)
    permuted = lean_decode(problem.q[:, :, order], problem.k, problem.v, num_workers=num_workers)
    assert_close(permuted, (o[:, :, order], lse[:, :, order]), rtol=1e-6, atol=1e-6)


@settings(max_examples=25)
@given(**small, shift=st.sampled_from([-1e4, -50.0, 3.0, 1e4]))
def test_adding_a_number_to_all_scores_moves_only_lse(seed, seqlen_k, num_workers, shift):
    problem = plain_problem(seed, seqlen_k)
    o, lse = problem.run(num_workers=num_workers)
    q = torch.cat([problem.q, torch.ones_like(problem.q[..., :1])], -1)
    k = torch.cat([problem.k, torch.full_like(problem.k[..., :1], shift)], -1)
    q[..., :32] *= 32**-0.5
    shifted = lean_decode(q, k, problem.v, softmax_scale=1.0, num_workers=num_workers)
    rounding = max(1.0, abs(shift)) * 2e-7  # of each shifted score
    assert_close(shifted[0], o, rtol=4 * rounding, atol=4 * rounding * problem.v.abs().max())
    assert_close(shifted[1], lse + shift, rtol=4e-7, atol=4 * rounding)


@settings(max_examples=25)
@given(**small)
def test_output_is_an_average_of_values(seed, seqlen_k, num_workers):
    problem = plain_problem(seed, seqlen_k)
    o, _ = problem.run(num_workers=num_workers)
    low, high = (x.repeat_interleave(3, 1) for x in problem.v.aminmax(dim=2, keepdim=True))
    slack = 1e-6 * problem.v.abs().max()
    assert ((low - slack <= o) & (o <= high + slack)).all()
    problem.v = torch.full_like(problem.v, -2.5)
    constant, _ = problem.run(num_workers=num_workers)
    assert_close(constant, torch.full_like(constant, -2.5), rtol=1e-6, atol=0)
    problem.v = torch.eye(seqlen_k).expand(2, 2, -1, -1)
    weights, _ = problem.run(num_workers=num_workers)
    assert (weights >= 0).all() and (weights <= 1 + 1e-6).all()
    assert_close(weights.sum(-1), torch.ones(2, 6, 1), rtol=1e-5, atol=0)


@settings(max_examples=25)
@given(**small)
def test_output_is_linear_in_values(seed, seqlen_k, num_workers):
    problem = plain_problem(seed, seqlen_k)
    other = torch.randn_like(problem.v)
    o, lse = problem.run(num_workers=num_workers)
    o_other, lse_other = lean_decode(problem.q, problem.k, other, num_workers=num_workers)
    both = lean_decode(problem.q, problem.k, 2 * problem.v - other, num_workers=num_workers)
    assert_close(both[0], 2 * o - o_other, rtol=1e-5, atol=1e-5)
    assert torch.equal(lse, lse_other) and torch.equal(lse, both[1]), "lse ignores the values"


@settings(max_examples=25)
@given(**small)
def test_one_dominant_key_and_no_preference(seed, seqlen_k, num_workers):
    problem = plain_problem(seed, seqlen_k)
    winner = seed % seqlen_k
    problem.k[:, :, winner] = 0
    problem.k[:, :, winner, 0], problem.q[..., 0] = 1e4, 8.0
    o, lse = problem.run(num_workers=num_workers)
    expected = problem.v[:, :, winner : winner + 1].repeat_interleave(3, 1)
    assert torch.equal(o, expected), "all weight on one key: its value, to the bit"
    assert_close(lse, torch.full_like(lse, 8e4 * 32**-0.5))
    problem.q.zero_()
    o, lse = problem.run(num_workers=num_workers)
    mean = problem.v.mean(2, keepdim=True).repeat_interleave(3, 1)
    assert_close(o, mean, rtol=1e-5, atol=1e-6)
    assert_close(lse, torch.full_like(lse, math.log(seqlen_k)), rtol=1e-6, atol=1e-6)


@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**31),
    lengths=st.lists(st.integers(0, 200), min_size=1, max_size=5),
)
def test_ragged_batch_equals_one_call_per_sequence(seed, lengths):
    torch.manual_seed(seed)
    problem = make_problem(batch=len(lengths), seqlen_k=max(lengths), head_dim=32)
    ranges = torch.tensor([[[0, length]] for length in lengths], dtype=torch.int32)
    o, lse = lean_decode(problem.q, problem.k, problem.v, ranges, num_workers=3)
    for b, length in enumerate(lengths):
        alone = Problem(*(x[b : b + 1] for x in (problem.q, problem.k, problem.v)))
        alone.k, alone.v = alone.k[:, :, :length], alone.v[:, :, :length]
        alone.check(o[b : b + 1], lse[b : b + 1])


@settings(max_examples=25)
@given(problems(paged=False))
def test_grouped_heads_equal_repeated_heads(problem):
    group_size = problem.q.shape[1] // problem.k.shape[1]
    k, v = (x.repeat_interleave(group_size, 1) for x in (problem.k, problem.v))
    repeated = Problem(problem.q, k, v, problem.key_ranges, problem.options)
    problem.check(*repeated.run())


@settings(max_examples=25)
@given(**small, shift=st.sampled_from([1, 100, 5000]))
def test_alibi_depends_on_query_positions_only_in_lse(seed, seqlen_k, num_workers, shift):
    """-slope * (i - j) and +slope * j differ by a constant in each row."""
    problem = plain_problem(seed, seqlen_k, alibi=1 / 16, seqlen_q=2)
    o, lse = problem.run(num_workers=num_workers)
    problem.options["query_positions"] = problem.options["query_positions"] + shift
    moved, moved_lse = problem.run_and_check(num_workers=num_workers)
    constant = problem.options["alibi_slopes"][:, None] * shift
    rounding = 4e-7 * (1 + constant.max().item())
    assert_close(moved, o, rtol=4 * rounding, atol=4 * rounding * problem.v.abs().max())
    assert_close(moved_lse, lse - constant, rtol=4e-7, atol=4 * rounding)
