# SPDX-License-Identifier: BSD-3-Clause
"""Every instruction set that this CPU has computes the same thing, not only the widest one."""

import math
import re
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers import NAN, assert_same_bits, make_problem
from test_lean_decode_properties import problems
from tree_attention import _C
from tree_attention.reference import attention


def supported() -> list[str]:
    """Widest first; the last one runs everywhere."""
    with pytest.raises(ValueError) as error:
        _C.set_cpu_instruction_set("mmx")
    message = re.fullmatch(
        r"set_instruction_set: name must be one of (\w+(, \w+)*), got mmx", str(error.value)
    )
    assert message
    return message[1].split(", ")


@pytest.fixture(params=["amx", "avx512", "avx2", "neon", "portable"])
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param not in supported():
        pytest.skip(f"no {request.param} on this CPU or in this build")
    before = _C.cpu_instruction_set()
    _C.set_cpu_instruction_set(request.param)
    yield request.param
    _C.set_cpu_instruction_set(before)


def test_choice_is_reported(instruction_set):
    assert _C.cpu_instruction_set() == instruction_set


def test_unknown_name_lists_the_supported_ones():
    assert _C.cpu_instruction_set() in supported()
    assert supported()[-1] in ("portable", "neon")


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(problem=problems(), num_workers=st.integers(0, 9))
def test_any_problem(instruction_set, problem, num_workers):
    result = problem.run_and_check(num_workers=num_workers)
    if num_workers:
        assert_same_bits(result, problem.run(num_workers=num_workers))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [*range(1, 36), 63, 65, 127, 129])
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


@pytest.mark.parametrize("page_size", [0, 1, 16, 24])
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
@pytest.mark.parametrize("group_size", [1, 8])
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
        assert o.flatten().tolist() == problem.v.float().flatten().tolist()


def test_instruction_sets_agree(instruction_set):
    """Up to rounding: bits are promised for one instruction set only."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        _C.set_cpu_instruction_set(instruction_set)
        problem = make_problem(seqlen_k=500, seqlen_q=2, ranges="causal", dtype=dtype)
        result = problem.run(num_workers=2, out_dtype=torch.float32)
        _C.set_cpu_instruction_set(supported()[-1])
        portable = problem.run(num_workers=2, out_dtype=torch.float32)
        torch.testing.assert_close(result, portable, rtol=2e-5, atol=2e-6)
