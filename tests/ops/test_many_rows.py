# SPDX-License-Identifier: BSD-3-Clause
"""Many rows of an output, which every instruction set attends on a path of their own."""

import math
from itertools import product

import pytest
import torch

from helpers import NAN, assert_same_bits, make_problem
from instruction_sets import MANY_ROWS
from pairwise import each_value
from tiers import tiers, tiers_of
from tree_attention.reference import attention
from tree_attention.reference.accuracy import lse_error

QUICK = [
    name
    for name in MANY_ROWS
    if name not in ("causal", "first keys", "window", "two outputs", "flushes")
]


@pytest.mark.parametrize("num_workers", tiers([3], [1]))
@pytest.mark.parametrize("name", tiers_of(MANY_ROWS, quick=QUICK))
def test_many_rows(instruction_set, name, num_workers):
    problem = make_problem(dtype=torch.bfloat16, **MANY_ROWS[name])
    result = problem.run_and_check(num_workers=num_workers)
    assert_same_bits(result, problem.run(num_workers=num_workers))


OTHER_DTYPES = {
    "float16": {"dtype": torch.float16},
    "float32": {"dtype": torch.float32},
    "float32, int8": {"dtype": torch.float32, "kv_dtype": torch.int8},
    "float16, float8": {"dtype": torch.float16, "kv_dtype": torch.float8_e4m3fn},
    "int8": {"dtype": torch.bfloat16, "kv_dtype": torch.int8},
}


OF_DTYPES = [*product(OTHER_DTYPES, ("causal", "window", "two outputs", "pages", "softcap"))]


@pytest.mark.parametrize("dtypes, name", tiers_of(OF_DTYPES, quick=each_value(OF_DTYPES)))
def test_many_rows_of_other_dtypes(instruction_set, dtypes, name):
    problem = make_problem(**MANY_ROWS[name] | OTHER_DTYPES[dtypes])
    problem.run_and_check(num_workers=3)


@pytest.mark.parametrize("head_dim, head_dim_v", tiers([(40, 24)], [(8, 8), (72, 136), (200, 56)]))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_many_rows_of_any_columns(instruction_set, dtype, head_dim, head_dim_v):
    """Vectors of columns that are not whole, and in which bfloat16 has another order."""
    make_problem(
        **MANY_ROWS["causal"], dtype=dtype, head_dim=head_dim, head_dim_v=head_dim_v
    ).run_and_check(num_workers=2)  # fmt: skip


@pytest.mark.parametrize("count", tiers([23, 24], [22, 25, 26]))
def test_rows_around_the_fewest_of_many(instruction_set, count):
    """Also where an output's last block has fewer rows than others, or one vector of them."""
    for seqlen_q in (count, 512 + count, 256 + count):
        make_problem(
            batch=1, num_heads_kv=1, group_size=1, seqlen_q=seqlen_q, ranges="causal",
            seqlen_k=seqlen_q + 90, head_dim=32, dtype=torch.float32,
        ).run_and_check(num_workers=3)  # fmt: skip


def test_many_rows_in_float32(instruction_set):
    """Weights keep more digits than bfloat16 has."""
    problem = make_problem(
        seqlen_q=64, ranges="all", seqlen_k=3000, dtype=torch.bfloat16, score_size=3.0
    )
    o, _ = problem.run(out_dtype=torch.float32)
    true_o, _ = attention(problem.q, problem.k, problem.v)
    error = (o - true_o).abs().amax(-1) / true_o.abs().amax(-1)
    assert error.max() < 2e-5  # one bfloat16 term: 2e-3


def test_many_rows_round_scores_as_little_as_few(instruction_set):
    """A chain of as many sums as there are columns would have an error of 1e-6."""
    problem = make_problem(seqlen_q=600, seqlen_k=600, ranges="causal", head_dim=128, batch=1)
    problem.q *= 3
    _, lse = problem.run()
    _, truth = attention(problem.q, problem.k, problem.v, problem.key_ranges)
    assert lse_error(lse, truth) < 8e-7


def test_many_rows_of_growing_scores(instruction_set):
    """What was summed so far is rescaled again and again."""
    problem = make_problem(seqlen_q=40, seqlen_k=1500, dtype=torch.bfloat16, softmax_scale=1.0)
    problem.q[..., 0], problem.q[..., 1:] = 1.0, problem.q[..., 1:] / 8
    problem.k[..., 0] = torch.linspace(-60, 60, 1500)
    o, lse = problem.run(out_dtype=torch.float32, num_workers=2)
    true_o, true_lse = attention(problem.q, problem.k, problem.v, softmax_scale=1.0)
    torch.testing.assert_close(o.double(), true_o, rtol=0, atol=1e-4)
    torch.testing.assert_close(lse.double(), true_lse, rtol=1e-6, atol=0)


def test_many_rows_of_special_numbers(instruction_set):
    """Values and scores that are not finite reach the rows that see them, and no others."""
    problem = make_problem(
        seqlen_q=70, ranges="causal", seqlen_k=2600, batch=1, dtype=torch.bfloat16
    )
    end = int(problem.key_ranges[0, -1, 1])
    problem.v[0, 0, end - 30, 3] = math.inf
    problem.v[0, 1, end - 20, 5] = NAN
    problem.k[0, 1, end - 10] = NAN
    problem.run_and_check(num_workers=2)
    problem = make_problem(seqlen_q=70, seqlen_k=300, dtype=torch.bfloat16)
    problem.q[..., 0] = 1.0
    problem.k[:, :, 10:120, 0] = -math.inf
    problem.run_and_check()
    problem.k[..., 0] = -math.inf
    o, lse = problem.run_and_check()
    assert (o == 0).all() and (lse == -math.inf).all()


@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("num_workers", [1, 3])
def test_a_score_of_minus_infinity_behind_padded_rows(instruction_set, num_workers, softcap):
    """27 rows are no whole vectors, and zero times the infinite key would be NaN."""
    problem = make_problem(
        batch=1, num_heads_kv=1, group_size=1, seqlen_q=27, seqlen_k=256, head_dim=16,
        dtype=torch.float32, softcap=softcap, ranges="all",
    )  # fmt: skip
    problem.q[..., 0] = 1.0
    problem.k[:, :, [191, 255], 0] = -math.inf
    problem.run_and_check(num_workers=num_workers)


@pytest.mark.parametrize("head_dim_v", [8, 24])
def test_columns_behind_values_are_not_summed(instruction_set, head_dim_v):
    """The scratch holds what a call before this one left."""
    for head_dim, seqlen_q in ((128, 128), (8, 33)):
        problem = make_problem(
            batch=1, num_heads_kv=1, group_size=1, seqlen_q=seqlen_q, seqlen_k=4096,
            head_dim=head_dim, head_dim_v=128 if seqlen_q == 128 else head_dim_v,
            dtype=torch.float32, ranges="all",
        )  # fmt: skip
        if seqlen_q == 128:
            problem.v *= 50
            problem.run(num_workers=1)
    problem.run_and_check(num_workers=1)


@pytest.mark.parametrize(
    "dtype, noise, low_keys, low, high",
    [(torch.float32, 0.1, 64, -18.0, -7.0), (torch.bfloat16, 0.01, 256, -18.5, -7.5)],
    ids=["float32", "bfloat16"],
)
def test_lse_where_scores_grow_by_less_than_the_slack(
    instruction_set, dtype, noise, low_keys, low, high
):
    """The terms of lse cancel then, if the first largest score stays the base. So many keys meet
    the rows at a time."""
    problem = make_problem(
        batch=1, num_heads_kv=1, group_size=1, seqlen_q=64, seqlen_k=1000, ranges="all",
        softmax_scale=1.0, dtype=dtype,
    )  # fmt: skip
    problem.q *= noise
    problem.q[..., 0] = 1.0
    problem.k[..., 0] = high
    problem.k[:, :, :low_keys, 0] = low
    problem.run_and_check(num_workers=1)


def test_many_rows_of_ten_billion(instruction_set):
    problem = make_problem(score_size=1e10, seqlen_q=20, seqlen_k=300, dtype=torch.bfloat16)
    o, _ = problem.run(out_dtype=torch.float32)
    true_o, _ = attention(problem.q, problem.k, problem.v)
    assert torch.equal(o.double(), true_o)


def test_many_rows_that_meet_keys_alone(instruction_set):
    """So that a block of rows takes one run of keys after the other."""
    problem = make_problem(seqlen_q=64, group_size=1, seqlen_k=2700, dtype=torch.bfloat16)
    problem.key_ranges = torch.tensor([0, 1300], dtype=torch.int32).repeat(2, 64, 1)
    problem.key_ranges[:, 32:] = torch.tensor([1300, 2700], dtype=torch.int32)
    problem.run_and_check(num_workers=1)


def test_many_rows_around_a_gap(instruction_set):
    """Pages between the ranges of an output's rows may be absent."""
    problem = make_problem(seqlen_q=40, seqlen_k=640, page_size=16, dtype=torch.bfloat16)
    problem.key_ranges[:, :20] = torch.tensor([0, 100], dtype=torch.int32)
    problem.key_ranges[:, 20:] = torch.tensor([500, 640], dtype=torch.int32)
    expected = problem.run_and_check()
    problem.options["page_table"][..., 7:31] = 1 << 30
    assert_same_bits(expected, problem.run())
