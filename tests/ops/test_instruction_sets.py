# SPDX-License-Identifier: BSD-3-Clause
"""Every instruction set that this CPU has computes the same thing, not only the widest one."""

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from emulated_amx import emulated_amx
from helpers import NAN, assert_same_bits, make_problem
from test_lean_decode_properties import problems
from tiers import tiers
from tree_attention import _C
from tree_attention.reference import attention
from tree_attention.reference.accuracy import lse_error


def supported() -> list[str]:
    """The one in use first; the last one runs everywhere."""
    with pytest.raises(ValueError) as error:
        _C.set_cpu_instruction_set("mmx")
    message = re.fullmatch(
        r"set_instruction_set: name must be one of (\w+(, \w+)*), got mmx", str(error.value)
    )
    assert message
    return message[1].split(", ")


def test_products_of_pairs_are_for_amd():
    """Intel's cores make fewer products of pairs of bfloat16 than of float32."""
    if not {"avx512", "avx512_bf16"} <= set(supported()):
        pytest.skip("no avx512_bf16 on this CPU")
    vendor = re.search(r"^vendor_id\s*: (\w+)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    assert vendor is not None
    first = min(supported().index(name) for name in ("avx512", "avx512_bf16"))
    assert (supported()[first] == "avx512") == (vendor[1] == "GenuineIntel")


NAMES = ("amx", "avx512_bf16", "avx512", "avx2", "neon_bf16", "neon", "portable")
# One text for all, over vectors: the widest and the narrowest find most of its mistakes.
QUICK = (supported()[0], supported()[-1])


@contextmanager
def use(name: str) -> Iterator[None]:
    """AMX is emulated where the CPU lacks only its tiles. What helpers.py allows avx512_bf16 only
    is then asked for as well."""
    if name == "amx" and name not in supported() and "avx512_bf16" in supported():
        with emulated_amx(), use("avx512"):
            yield
        return
    if name not in supported():
        pytest.skip(f"no {name} on this CPU or in this build")
    before = _C.cpu_instruction_set()
    _C.set_cpu_instruction_set(name)
    try:
        yield
    finally:
        _C.set_cpu_instruction_set(before)


@pytest.fixture(params=tiers(QUICK, [name for name in NAMES if name not in QUICK]))
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    with use(request.param):
        yield request.param


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


# Many rows: matrix units take other paths then.
MANY_ROWS = {
    "all": {"seqlen_q": 40, "seqlen_k": 300},
    "causal": {"seqlen_q": 130, "ranges": "causal", "seqlen_k": 700},
    "first keys": {"seqlen_q": 150, "ranges": "causal", "seqlen_k": 150, "group_size": 5},
    "window": {"seqlen_q": 300, "ranges": "window", "seqlen_k": 600, "group_size": 1},
    "random": {"seqlen_q": 64, "ranges": "random", "seqlen_k": 200},
    "ragged": {"seqlen_q": 20, "ranges": "ragged", "layout": "BSHD", "batch": 4},
    "flushes": {"seqlen_q": 24, "ranges": "causal", "seqlen_k": 4500, "batch": 1},
    "two outputs": {"seqlen_q": 333, "ranges": "causal", "seqlen_k": 400, "num_heads_kv": 1},
    "pages": {
        "seqlen_q": 50,
        "ranges": "causal",
        "page_size": 16,
        "seqlen_k": 390,
        "layout": "BSHD",
    },
    "values": {"seqlen_q": 70, "ranges": "causal", "head_dim": 96, "head_dim_v": 32},
    "d 256": {"seqlen_q": 30, "ranges": "causal", "head_dim": 256, "seqlen_k": 280},
    "alibi": {"seqlen_q": 40, "ranges": "causal", "alibi": 1 / 64, "seqlen_k": 300},
    "softcap": {"seqlen_q": 40, "ranges": "causal", "softcap": 5.0, "score_size": 3.0},
    "negative": {"seqlen_q": 40, "ranges": "causal", "softmax_scale": -0.4, "score_size": 3.0},
    "no scale": {"seqlen_q": 40, "ranges": "causal", "softmax_scale": 0.0},
}


@pytest.mark.parametrize("num_workers", tiers([3], [1]))
@pytest.mark.parametrize("name", MANY_ROWS)
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


@pytest.mark.parametrize("name", ["causal", "window", "two outputs", "pages", "softcap"])
@pytest.mark.parametrize("dtypes", OTHER_DTYPES)
def test_many_rows_of_other_dtypes(instruction_set, dtypes, name):
    problem = make_problem(**MANY_ROWS[name] | OTHER_DTYPES[dtypes])
    problem.run_and_check(num_workers=3)


@pytest.mark.parametrize("head_dim, head_dim_v", [(8, 8), (40, 24), (72, 136), (200, 56)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_many_rows_of_any_columns(instruction_set, dtype, head_dim, head_dim_v):
    """Vectors of columns that are not whole, and in which bfloat16 has another order."""
    make_problem(
        **MANY_ROWS["causal"], dtype=dtype, head_dim=head_dim, head_dim_v=head_dim_v
    ).run_and_check(num_workers=2)  # fmt: skip


@pytest.mark.parametrize("count", range(22, 27))
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


def test_lse_where_scores_grow_by_less_than_the_slack(instruction_set):
    """The terms of lse cancel then, if the first largest score stays the base."""
    problem = make_problem(
        batch=1, num_heads_kv=1, group_size=1, seqlen_q=64, seqlen_k=1000, ranges="all",
        softmax_scale=1.0, dtype=torch.float32,
    )  # fmt: skip
    problem.q *= 0.1
    problem.q[..., 0] = 1.0
    problem.k[..., 0] = -7.0
    problem.k[:, :, :64, 0] = -18.0
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
