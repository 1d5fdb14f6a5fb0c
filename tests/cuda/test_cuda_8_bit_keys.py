# SPDX-License-Identifier: BSD-3-Clause
"""Keys and values of 8 bits on CUDA: the bounds of the CPU (test_8_bit_keys.py)."""

import math

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
from dry_device import sized
from emulated import emulated_operators
from helpers import NAN, Problem, assert_same_bits, make_problem
from tree_attention import lean_decode, reference

DTYPES = [torch.bfloat16, torch.float16]
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])

ALL_CASES = CASES | {
    "a tile and one": {"seqlen_k": 257},
    "several times round the ring": {"seqlen_k": 3000, "batch": 1},
    "many rows": {"group_size": 4, "seqlen_q": 40, "ranges": "causal", "seqlen_k": 400},
    "many rows, head_dim 256": {"seqlen_q": 20, "ranges": "causal", "head_dim": 256},
}


@by_dtype
@by_kv_dtype
@pytest.mark.parametrize("name", ALL_CASES)
def test_case(name, kv_dtype, dtype, cuda_kernels):
    problem = make_problem(kv_dtype=kv_dtype, dtype=dtype, **ALL_CASES[name])
    assert problem.k.dtype == problem.v.dtype == kv_dtype
    problem = problem.to(cuda_kernels)
    for num_workers in (1, 3):
        result = problem.run_and_check(num_workers=num_workers)
        assert_same_bits(result, problem.run(num_workers=num_workers))


@by_dtype
@by_kv_dtype
@pytest.mark.parametrize("head_dim", range(16, 257, 16))
def test_head_dims(head_dim, kv_dtype, dtype, cuda_kernels):
    """Buckets and what is narrower: columns beyond head_dim are neither read nor written."""
    problem = make_problem(
        head_dim=head_dim, seqlen_q=2, ranges="causal", layout="padded", dtype=dtype, seqlen_k=300,
        kv_dtype=kv_dtype,
    )  # fmt: skip
    problem.to(cuda_kernels).run_and_check()


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**31), seqlen_k=st.integers(1, 600), seqlen_q=st.sampled_from([1, 2, 5]),
    group_size=st.sampled_from([1, 2, 4, 5, 8]), head_dim=st.sampled_from([16, 64, 80, 128]),
    kv_dtype=st.sampled_from([INT8, FLOAT8]), page_size=st.sampled_from([0, 0, 5, 32]),
    dtype=st.sampled_from(DTYPES), num_workers=st.integers(0, 5),
    layout=st.sampled_from(["BHSD", "BSHD", "padded"]),
    ranges=st.sampled_from(["all", "ragged", "left padded", "causal", "window", "random"]),
)  # fmt: skip
def test_any_problem_in_any_order_of_blocks(seed, num_workers, **shape):
    """Emulated: the seed decides which block runs when."""
    torch.manual_seed(seed)
    problem = make_problem(**shape)
    with emulated_operators(0):
        result = problem.run_and_check(num_workers=num_workers)
    with emulated_operators(seed):
        assert_same_bits(result, problem.run(num_workers=num_workers))


# The fixture only says whether there is a device.
@settings(max_examples=sized(200), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 2**31), seqlen_k=st.integers(1, 5000), seqlen_q=st.sampled_from([1, 1, 3]),
    head_dim=st.sampled_from([64, 128, 256]), kv_dtype=st.sampled_from([INT8, FLOAT8]),
    page_size=st.sampled_from([0, 0, 16]), dtype=st.sampled_from(DTYPES),
    ranges=st.sampled_from(["all", "ragged", "causal"]),
)  # fmt: skip
def test_any_problem(cuda, seed, **shape):
    torch.manual_seed(seed)
    problem = make_problem(**shape).to(cuda)
    for num_workers in (0, 37):
        problem.run_and_check(num_workers=num_workers)


@by_kv_dtype
@by_dtype
def test_every_byte(dtype, kv_dtype, cuda_kernels):
    """Of a key and of a value, in all places of a chunk of 16."""
    problem, halves = every_byte(kv_dtype, dtype)
    o, lse = problem.to(cuda_kernels).run(out_dtype=torch.float32)
    check_every_byte(o.cpu(), lse.cpu(), halves, rtol=3e-5)


@by_dtype
@by_kv_dtype
def test_bits_do_not_depend_on_strides_or_pages(kv_dtype, dtype, cuda_kernels):
    bits = []
    for layout, page_size in PLACES:
        torch.manual_seed(5)
        problem = make_problem(
            kv_dtype=kv_dtype, seqlen_k=300, layout=layout, page_size=page_size, seqlen_q=2,
            dtype=dtype,
        )  # fmt: skip
        bits.append(problem.to(cuda_kernels).run_and_check(num_workers=3))
    for other in bits[1:]:
        assert_same_bits(other, bits[0])


@by_dtype
@by_kv_dtype
@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
def test_nan_of_a_scale_reaches_the_rows_that_see_it(name, kv_dtype, dtype, cuda_kernels):
    problem = seen_by_two_of_three(kv_dtype, dtype)
    problem.options[name][1, 0, 120] = NAN
    o, lse = problem.to(cuda_kernels).run_and_check(num_workers=2)
    assert o[1, :4, :2].isnan().all() and o.isnan().any(-1).sum() == 8
    assert lse.isnan().sum() == (8 if name == "k_scale" else 0)


@by_dtype
@pytest.mark.parametrize("byte", [0x7F, 0xFF])
def test_nan_bytes_of_keys_reach_the_rows_that_see_them(byte, dtype, cuda_kernels):
    problem = seen_by_two_of_three(FLOAT8, dtype)
    problem.k.view(torch.uint8)[1, 0, 120, 5] = byte
    o, lse = problem.to(cuda_kernels).run_and_check(num_workers=2)
    assert o[1, :4, :2].isnan().all() and o.isnan().any(-1).sum() == 8
    assert lse.isnan().sum() == 8


@by_dtype
@pytest.mark.parametrize("byte", [0x7F, 0xFF])
def test_nan_bytes_of_values_reach_their_columns(byte, dtype, cuda_kernels):
    """Of a key that all queries of its step see: they share products of weights and values."""
    problem = make_problem(seqlen_q=3, seqlen_k=200, kv_dtype=FLOAT8, dtype=dtype)
    problem.v.view(torch.uint8)[1, 0, 120, 5] = byte
    o, lse = problem.to(cuda_kernels).run_and_check(num_workers=2)
    assert o[1, :4, :, 5].isnan().all() and o.isnan().sum() == 12
    assert lse.isfinite().all()


@by_dtype
@by_kv_dtype
def test_scales_are_used_as_they_are(kv_dtype, dtype, cuda_kernels):
    """Negative, zero, infinite, and of any magnitude, which plain PyTorch in float16 has not."""
    problem = make_problem(seqlen_k=100, kv_dtype=kv_dtype, dtype=dtype)
    problem.options["k_scale"][0] *= -1
    problem.options["v_scale"][0] *= -(2.0**60)
    problem.options["k_scale"][1, :, 50:] = problem.options["v_scale"][1, :, :50] = 0.0
    o, lse = (x.cpu() for x in problem.to(cuda_kernels).run(out_dtype=torch.float32))
    true_o, true_lse = reference.attention(problem.q, problem.k, problem.v, **problem.options)
    error = (o - true_o).abs().amax(-1) / true_o.abs().amax(-1)
    assert error.max() < torch.finfo(dtype).eps
    torch.testing.assert_close(lse.double(), true_lse, rtol=1e-6, atol=1e-5)
    problem.options["v_scale"][1, 0, 70] = math.inf
    problem.v[1, 0, 70] = torch.full((64,), 3.0).to(kv_dtype)
    o, _ = problem.to(cuda_kernels).run(out_dtype=torch.float32)
    assert (o[1, :4] == math.inf).all() and o[1, 4:].isfinite().all()


@by_dtype
@by_kv_dtype
@pytest.mark.parametrize("v_scale", [1e-20, 0.02, 1e20, 1e30])
def test_scales_of_values_do_not_touch_lse(v_scale, kv_dtype, dtype, cuda_kernels):
    problem = make_problem(seqlen_k=2, kv_dtype=kv_dtype, dtype=dtype).to(cuda_kernels)
    problem.q.zero_(), problem.options["v_scale"].fill_(v_scale)
    _, lse = problem.run()
    assert (lse - math.log(2)).abs().max() < 2e-7


@by_dtype
@by_kv_dtype
@pytest.mark.parametrize("size", [1e7, 3e8, 1e10, 1e15])
@pytest.mark.parametrize("sign", [1, -1])
def test_scores_of_any_size(sign, size, kv_dtype, dtype, cuda_kernels):
    """Beside which the logarithms of scales are below their rounding; several warps have equal
    ones, and scales of any magnitude decide between them."""
    for keys, group_size in ((1, 4), (300, 4), (300, 16)):
        problem = make_problem(seqlen_k=keys, kv_dtype=kv_dtype, dtype=dtype, group_size=group_size)
        problem.q.zero_(), problem.k.zero_()
        problem.q[..., 0], problem.k[..., 0] = sign, 4
        problem.k[:, :, 7:200, 0] = 4 - sign  # no weight at all
        problem.options |= {"softmax_scale": size / 4}
        problem.options["k_scale"].fill_(1.0)
        problem.options["v_scale"][0] *= 2.0**60
        problem.options["v_scale"][1, :, 1::2] *= 2.0**-60
        problem = problem.to(cuda_kernels)
        o, lse = problem.run(num_workers=1, out_dtype=torch.float32)
        # lse does not hold what the reference subtracts it for.
        q, k, v = (
            x.double() for x in (problem.q.unflatten(1, (-1, group_size)), problem.k, problem.v)
        )
        scores = size / 4 * (q.squeeze(3) @ k.mT)
        true_o = torch.softmax(scores, -1) @ (v * problem.options["v_scale"].double()[..., None])
        error = (o - true_o.flatten(1, 2)[:, :, None]).abs().amax(-1)
        assert (error / true_o.abs().amax(-1).flatten(1)[..., None]).max() < 2**-10
        true_lse = scores.logsumexp(-1).flatten(1)[..., None]
        torch.testing.assert_close(lse.double(), true_lse, rtol=3e-7, atol=0)


@by_kv_dtype
@pytest.mark.parametrize("exponent", [-40, 40])
def test_queries_of_any_magnitude(exponent, kv_dtype, cuda_kernels):
    """They are bfloat16, and products are taken of float16; powers of two change no digit."""
    problem = make_problem(seqlen_k=100, kv_dtype=kv_dtype, dtype=torch.bfloat16)
    expected = problem.to(cuda_kernels).run_and_check()
    problem.q *= 2.0**exponent
    problem.options["softmax_scale"] = problem.q.shape[-1] ** -0.5 * 2.0**-exponent
    assert_same_bits(problem.to(cuda_kernels).run(), expected)


@by_dtype
def test_float8_without_scales(dtype, cuda_kernels):
    problem = make_problem(kv_dtype=FLOAT8, dtype=dtype, seqlen_k=500, seqlen_q=2, page_size=16)
    table = problem.options["page_table"]
    ones = torch.ones(problem.k.shape[:3])
    problem.options = {"softmax_scale": 1e-4, "page_table": table}
    result = problem.to(cuda_kernels).run_and_check()
    problem.options |= {"k_scale": ones, "v_scale": ones}
    assert_same_bits(result, problem.to(cuda_kernels).run())


@by_dtype
def test_scales_of_any_strides(dtype, cuda_kernels):
    problem = make_problem(kv_dtype=INT8, seqlen_k=90, page_size=8, seqlen_q=2, dtype=dtype)
    expected = problem.to(cuda_kernels).run_and_check()
    assert_same_bits(with_scales_by_token(problem).to(cuda_kernels).run(), expected)
    with_one_scale(problem.to(cuda_kernels)).run_and_check()


def message_of(problem: Problem) -> str:
    with pytest.raises(ValueError) as error:
        problem.run()
    return str(error.value).splitlines()[0]


@by_kv_dtype
def test_float32_queries_are_refused(kv_dtype, cuda_kernels):
    problem = make_problem(kv_dtype=kv_dtype).to(cuda_kernels)
    assert message_of(problem) == (
        "lean_decode: q must be bfloat16 or float16 on CUDA for keys of 8 bits, got float32"
    )


@pytest.mark.parametrize("head_dim", [8, 72, 272])
def test_head_dims_that_are_refused(head_dim, cuda_kernels):
    message = f"must be a multiple of 16 up to 256 on CUDA for keys of 8 bits, got {head_dim}"
    options = {"kv_dtype": INT8, "dtype": torch.bfloat16}
    problem = make_problem(head_dim=head_dim, head_dim_v=64, **options).to(cuda_kernels)
    assert message_of(problem) == f"lean_decode: head_dim {message}"
    problem = make_problem(head_dim=64, head_dim_v=head_dim, **options).to(cuda_kernels)
    assert message_of(problem) == f"lean_decode: head_dim of v {message}"


@pytest.mark.parametrize("argument", ["k", "v"])
def test_alignment(argument, cuda_kernels):
    problem = make_problem(kv_dtype=INT8, dtype=torch.bfloat16).to(cuda_kernels)
    x = getattr(problem, argument)
    storage = torch.zeros(x.numel() + 8, dtype=INT8, device=x.device)
    setattr(problem, argument, storage[8:].view(x.shape))
    assert message_of(problem) == (
        f"lean_decode: {argument} must begin at a multiple of 16 bytes on CUDA, got one 8 bytes "
        "beyond"
    )
    stride = x.stride(0), x.stride(1) + 8, x.stride(2), 1
    strided = torch.empty_strided(x.shape, stride, dtype=INT8, device=x.device)
    setattr(problem, argument, strided)
    assert message_of(problem) == (
        f"lean_decode: {argument} must have strides that are multiples of 16 bytes on CUDA, got "
        f"{stride[1]} elements of 1 bytes on axis 1"
    )


@by_kv_dtype
@by_dtype
@pytest.mark.parametrize("keys", [sized(128 << 10), sized(1 << 20)], ids=["128k", "1M"])
def test_long_contexts(keys, dtype, kv_dtype, cuda):
    from test_cuda_numerics import check, need_memory

    need_memory(12 << 30)
    options = {"batch": 1, "num_heads_kv": 2, "head_dim": 128}
    problem = make_problem(seqlen_k=keys, dtype=dtype, kv_dtype=kv_dtype, **options).to(cuda)
    check(problem.q, problem.k, problem.v, **problem.options)


@by_kv_dtype
def test_graphs_replay_with_other_scales(kv_dtype, cuda):
    problem = make_problem(seqlen_k=700, dtype=torch.bfloat16, kv_dtype=kv_dtype).to(cuda)
    problem.run_and_check()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, lse = lean_decode(problem.q, problem.k, problem.v, **problem.options)
    for factor in (0.5, 3.0):
        problem.options["v_scale"] *= factor
        problem.options["k_scale"] *= factor
        graph.replay()
        problem.check(o, lse)
