# SPDX-License-Identifier: BSD-3-Clause
"""Keys and values of 8 bits: every instruction set is exact on what they stand for."""

import math
from itertools import product

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cases_8_bit_keys import (
    CASES,
    FLOAT8,
    INT8,
    PLACES,
    by_kv_dtype,
    check_every_byte,
    every_byte,
    seen_by_two_of_three,
    with_one_scale,
    with_scales_by_token,
)
from helpers import NAN, assert_same_bits, make_problem
from pairwise import each_pair, each_value
from tiers import tiers, tiers_of
from tree_attention import reference

pytestmark = pytest.mark.usefixtures("instruction_set")
by_dtype = pytest.mark.parametrize(
    "dtype",
    tiers([torch.float32, torch.bfloat16], [torch.float16]),
    ids=lambda dtype: str(dtype)[6:],
)

ALL_CASES = CASES | {
    "plain": {},
    "one step and one": {"seqlen_k": 33},
    "several flushes": {"seqlen_k": 5000, "batch": 1},
    "eight rows": {"group_size": 8, "num_heads_kv": 1},
    "many rows": {"batch": 1, "group_size": 4, "seqlen_q": 70, "ranges": "causal", "seqlen_k": 700},
    "many rows, alibi, softcap": {"seqlen_q": 40, "alibi": 1 / 64, "softcap": 3.0},
    "head_dim 1": {"head_dim": 1},
    "head_dim 33": {"head_dim": 33, "head_dim_v": 37, "layout": "unaligned"},
    "head_dim 96": {"head_dim": 96},
    "head_dim 256": {"head_dim": 256},
    "latents": {"head_dim": 576, "head_dim_v": 512, "num_heads_kv": 1, "group_size": 16},
}


SLOW = {"several flushes", "many rows", "many rows on pages", "many rows in a window"}
OF_DTYPES = [*product(ALL_CASES, (INT8, FLOAT8), (torch.float32, torch.bfloat16, torch.float16))]
FIRST = each_value(OF_DTYPES)
QUICK = [x for x in FIRST if x[0] not in SLOW]


@pytest.mark.parametrize(
    "name, kv_dtype, dtype", tiers_of([*FIRST, *each_pair(OF_DTYPES, FIRST)], QUICK)
)
def test_exact(name, kv_dtype, dtype):
    problem = make_problem(kv_dtype=kv_dtype, dtype=dtype, **ALL_CASES[name])
    assert problem.k.dtype == problem.v.dtype == kv_dtype
    for num_workers in (1, 3):
        result = problem.run_and_check(num_workers=num_workers)
        assert_same_bits(result, problem.run(num_workers=num_workers))


@pytest.mark.deep
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 2**31), seqlen_k=st.integers(1, 400), seqlen_q=st.integers(1, 5),
    group_size=st.sampled_from([1, 2, 4, 5, 8]), head_dim=st.sampled_from([8, 40, 64, 128]),
    kv_dtype=st.sampled_from([INT8, FLOAT8]), page_size=st.sampled_from([0, 5, 32]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]), num_workers=st.integers(0, 5),
    ranges=st.sampled_from(["all", "ragged", "left padded", "causal", "window", "random"]),
)  # fmt: skip
def test_any_problem(seed, num_workers, **shape):
    torch.manual_seed(seed)
    make_problem(**shape).run_and_check(num_workers=num_workers)


@by_kv_dtype
@pytest.mark.parametrize("seqlen_q", [1, 40], ids=["few rows", "many rows"])
def test_float32_digits(seqlen_q, kv_dtype):
    """Neither keys nor values nor weights are rounded to the queries' bfloat16."""
    problem = make_problem(
        seqlen_q=seqlen_q, seqlen_k=3000, dtype=torch.bfloat16, kv_dtype=kv_dtype, score_size=3.0
    )
    o, lse = problem.run(out_dtype=torch.float32)
    true_o, true_lse = reference.attention(problem.q, problem.k, problem.v, **problem.options)
    error = (o - true_o).abs().amax(-1) / true_o.abs().amax(-1)
    assert error.max() < 2e-5  # of one bfloat16 term: 2e-3
    torch.testing.assert_close(lse.double(), true_lse, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("size", [1e-14, 1.0, 1e25])
@pytest.mark.parametrize("rows", [1, 4, 5, 8])
def test_queries_of_any_size(rows, size):
    """Few queries meet keys of int8 as integers, in units of their largest element."""
    problem = make_problem(
        seqlen_k=200, group_size=rows, head_dim=96, dtype=torch.bfloat16, kv_dtype=INT8
    )
    spread = torch.logspace(0, -9, 96)[torch.randperm(96)]  # of the elements of a query
    q = (problem.q.double() * spread * size).to(torch.bfloat16)
    problem.q, problem.options["softmax_scale"] = q, 3.0 / size
    o, lse = problem.run(out_dtype=torch.float32)
    true_o, true_lse = reference.attention(problem.q, problem.k, problem.v, **problem.options)
    error = (o - true_o).abs().amax(-1) / true_o.abs().amax(-1)
    assert error.max() < 2e-5
    torch.testing.assert_close(lse.double(), true_lse, rtol=3e-6, atol=3e-6)


@pytest.mark.parametrize("exponent", [-80, -99, -101, -110])
@pytest.mark.parametrize("rows", [1, 5])
def test_small_queries_of_large_keys(rows, exponent):
    """However small the queries are, the scales of the keys may make up for it."""
    problem = make_problem(
        seqlen_k=200, group_size=rows, head_dim=96, dtype=torch.bfloat16, kv_dtype=INT8
    )
    problem.q = (problem.q.double() * 2.0**exponent).to(torch.bfloat16)
    scale = problem.options["k_scale"]
    problem.options["k_scale"] = (scale.double() * 2.0**-exponent).float()
    problem.run_and_check()


@pytest.mark.parametrize("bad", [NAN, math.inf])
def test_a_query_that_is_not_finite(bad):
    problem = make_problem(seqlen_k=200, dtype=torch.bfloat16, kv_dtype=INT8)
    o, lse = problem.run()
    problem.q[1, 2, 0, 5] = bad
    other_o, other_lse = problem.run()
    assert other_o[1, 2].isnan().all() and other_lse[1, 2].isnan().all()
    others = torch.ones(lse.shape, dtype=torch.bool)
    others[1, 2] = False
    torch.testing.assert_close(other_o[others], o[others])
    torch.testing.assert_close(other_lse[others], lse[others])


@by_kv_dtype
@by_dtype
def test_every_byte(dtype, kv_dtype):
    """Of a key and of a value, in all places of vectors and tiles."""
    problem, halves = every_byte(kv_dtype, dtype)
    check_every_byte(*problem.run(out_dtype=torch.float32), halves, rtol=0)


@pytest.mark.parametrize("kv_dtype", tiers([INT8], [FLOAT8]), ids=["int8", "float8"])
def test_bits_do_not_depend_on_strides_or_pages(kv_dtype):
    bits = []
    for layout, page_size in PLACES:
        torch.manual_seed(5)
        problem = make_problem(
            kv_dtype=kv_dtype, seqlen_k=2200, layout=layout, page_size=page_size, seqlen_q=2,
            dtype=torch.bfloat16,
        )  # fmt: skip
        bits.append(problem.run_and_check(num_workers=3))
    for other in bits[1:]:
        assert_same_bits(other, bits[0])


@by_kv_dtype
@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
def test_nan_of_a_scale_reaches_the_rows_that_see_it(name, kv_dtype):
    problem = seen_by_two_of_three(kv_dtype, torch.bfloat16)
    problem.options[name][1, 0, 120] = NAN
    o, lse = problem.run_and_check(num_workers=2)
    assert o[1, :4, :2].isnan().all() and o.isnan().any(-1).sum() == 8
    assert lse.isnan().sum() == (8 if name == "k_scale" else 0)


@pytest.mark.parametrize("name", ["k", "v"])
@pytest.mark.parametrize("byte", [0x7F, 0xFF])
def test_nan_bytes_of_float8_reach_the_rows_that_see_them(name, byte):
    problem = seen_by_two_of_three(FLOAT8, torch.bfloat16)
    getattr(problem, name).view(torch.uint8)[1, 0, 120, 5] = byte
    o, lse = problem.run_and_check(num_workers=2)
    assert o.isnan().any(-1)[1, :4, :2].all() and o.isnan().any(-1).sum() == 8
    assert o.isnan().sum() == (8 * 64 if name == "k" else 8)
    assert lse.isnan().sum() == (8 if name == "k" else 0)


@by_kv_dtype
def test_scales_are_used_as_they_are(kv_dtype):
    """Negative, zero, infinite, and of any magnitude."""
    problem = make_problem(seqlen_k=100, kv_dtype=kv_dtype, dtype=torch.bfloat16)
    problem.options["k_scale"][0] *= -1
    problem.options["v_scale"][0] *= -(2.0**60)
    problem.options["k_scale"][1, :, 50:] = problem.options["v_scale"][1, :, :50] = 0.0
    problem.run_and_check()
    problem.options["v_scale"][1, 0, 70] = math.inf
    problem.v[1, 0, 70] = torch.full((64,), 3.0).to(kv_dtype)
    o, _ = problem.run_and_check()
    assert (o[1, :4] == math.inf).all()


def test_float8_without_scales():
    problem = make_problem(kv_dtype=FLOAT8, dtype=torch.bfloat16, seqlen_k=500, seqlen_q=2)
    problem.options = {"softmax_scale": 1e-4}
    o, lse = problem.run_and_check()
    ones = torch.ones(problem.k.shape[:3])
    assert_same_bits((o, lse), problem.run(k_scale=ones, v_scale=ones))


def test_scales_of_any_strides():
    problem = make_problem(kv_dtype=INT8, seqlen_k=90, page_size=8, seqlen_q=2)
    expected = problem.run()
    assert_same_bits(with_scales_by_token(problem).run(), expected)
    with_one_scale(problem).run_and_check()
