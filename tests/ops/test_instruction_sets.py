# SPDX-License-Identifier: BSD-3-Clause
"""Every instruction set that this CPU has computes the same thing, not only the widest one."""

import math
import re
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from emulated_amx import emulated_amx
from helpers import NAN, assert_same_bits, make_problem
from instruction_sets import MANY_ROWS, NAMES, QUICK, supported, use
from test_lean_decode_properties import problems
from tiers import tiers, tiers_of
from tree_attention import _C
from tree_attention.reference import attention


def test_products_of_pairs_are_for_amd():
    """Intel's cores make fewer products of pairs of bfloat16 than of float32."""
    if not {"avx512", "avx512_bf16"} <= set(supported()):
        pytest.skip("no avx512_bf16 on this CPU")
    vendor = re.search(r"^vendor_id\s*: (\w+)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    assert vendor is not None
    first = min(supported().index(name) for name in ("avx512", "avx512_bf16"))
    assert (supported()[first] == "avx512") == (vendor[1] == "GenuineIntel")


def test_choice_is_reported():
    for name in supported():
        with use(name):
            assert _C.cpu_instruction_set() == name


def test_unknown_name_lists_the_supported_ones():
    assert _C.cpu_instruction_set() in supported()
    assert supported()[-1] == "portable"


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(problem=problems(), num_workers=st.integers(0, 9))
def test_any_problem(instruction_set, problem, num_workers):
    result = problem.run_and_check(num_workers=num_workers)
    if num_workers:
        assert_same_bits(result, problem.run(num_workers=num_workers))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "head_dim",
    tiers_of([*range(1, 36), 63, 65, 127, 129], quick=[1, 3, 7, 8, 9, 15, 17, 31, 33, 65]),
)
def test_every_tail_of_a_vector(instruction_set, head_dim, dtype):
    """Loads past the end of a row would read the NaN between the strides."""
    make_problem(
        batch=1, head_dim=head_dim, head_dim_v=40 - head_dim if head_dim < 36 else head_dim,
        seqlen_k=37, layout="unaligned", dtype=dtype, group_size=3,
    ).run_and_check()  # fmt: skip


def test_infinities_and_nan(instruction_set):
    problem = make_problem(seqlen_k=130)
    problem.q[..., 0] = 1.0
    problem.k[:, :, 10:120, 0] = -math.inf
    problem.run_and_check(num_workers=3)
    problem.k[..., 0] = -math.inf
    o, lse = problem.run_and_check(num_workers=3)
    assert (o == 0).all() and (lse == -math.inf).all()
    problem = make_problem(seqlen_k=130, softcap=5.0)
    problem.k[0, 0, 77] = NAN
    _, lse = problem.run_and_check(num_workers=3)
    assert lse.isnan().sum() == 4


@pytest.mark.parametrize("page_size", tiers([0, 16], [1, 24]))
@pytest.mark.parametrize("group_size", [4, 5, 8, 9])
def test_rows_in_lanes(instruction_set, group_size, page_size):
    """Tiles have columns for 4, 8 or 16 rows, whose scores share a vector; 1,300 keys are enough
    for every kind of fetching ahead, also past the last one."""
    make_problem(
        batch=1, group_size=group_size, seqlen_k=1300, head_dim=96, head_dim_v=32,
        dtype=torch.bfloat16, page_size=page_size, alibi=1 / 64, softcap=4.0,
    ).run_and_check(num_workers=1)  # fmt: skip


def test_scores_of_ten_thousand(instruction_set):
    o, _ = make_problem(score_size=1e4, seqlen_k=300).run_and_check(num_workers=2)
    assert o.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("group_size", tiers([8], [1]))
def test_infinite_values(instruction_set, dtype, group_size):
    """They are no reason for NaN, which products of parts of a weight, one of them 0, would be."""
    problem = make_problem(dtype=dtype, seqlen_k=4500, group_size=group_size)
    problem.v[0, 0, 40, 3] = math.inf
    problem.v[1, 1, 3000, 5] = -math.inf
    problem.v[0, 1, 4498, 7] = NAN
    problem.run_and_check(num_workers=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("group_size", [1, 8])
def test_scores_of_ten_billion(instruction_set, dtype, group_size):
    """Their rounding errors exceed every exponent; the largest one still has the weight 1."""
    problem = make_problem(score_size=1e10, seqlen_k=300, dtype=dtype, group_size=group_size)
    o, _ = problem.run(out_dtype=torch.float32)
    true_o, _ = attention(problem.q, problem.k, problem.v)
    assert torch.equal(o.double(), true_o)


def test_half_precision_extremes(instruction_set):
    """Subnormals, the largest finite numbers and signed zeros are converted exactly."""
    for dtype in (torch.float16, torch.bfloat16):
        info = torch.finfo(dtype)
        subnormal = info.smallest_normal / 4
        values = [0.0, -0.0, subnormal, -subnormal, info.tiny, info.max, -info.max, 1.0]
        problem = make_problem(
            seqlen_k=1, head_dim=8, dtype=dtype, batch=1, num_heads_kv=1, group_size=1
        )
        problem.q.zero_()
        problem.v[:] = torch.tensor(values, dtype=dtype)
        o, _ = problem.run(out_dtype=torch.float32)
        expected = problem.v.float().flatten()
        if instruction_set in ("avx512_bf16", "neon_bf16") and dtype == torch.bfloat16:
            expected[expected.abs() < info.smallest_normal] = 0.0  # as products of pairs take them
        assert o.flatten().tolist() == expected.tolist()


@pytest.mark.parametrize("name", tiers(QUICK[:1], NAMES[:-1]))
def test_instruction_sets_agree(name):
    """Up to rounding: bits are promised for one instruction set only."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        problem = make_problem(seqlen_k=500, seqlen_q=2, ranges="causal", dtype=dtype)
        with use(name):
            result = problem.run(num_workers=2, out_dtype=torch.float32)
        with use(supported()[-1]):
            portable = problem.run(num_workers=2, out_dtype=torch.float32)
        torch.testing.assert_close(result, portable, rtol=2e-5, atol=2e-6)


@pytest.mark.deep
def test_emulated_tiles_have_the_bits_of_real_ones():
    if "amx" not in supported():
        pytest.skip("no amx on this CPU")
    for shape in ({}, {"kv_dtype": torch.int8}, {"group_size": 16}, MANY_ROWS["causal"]):
        problem = make_problem(dtype=torch.bfloat16, **shape)
        with use("amx"):
            expected = problem.run(num_workers=3, out_dtype=torch.float32)
        with emulated_amx():
            assert_same_bits(problem.run(num_workers=3, out_dtype=torch.float32), expected)
