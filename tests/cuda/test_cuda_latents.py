# SPDX-License-Identifier: BSD-3-Clause
"""Latents on CUDA: keys of up to 576 columns, whose first 512 are their values."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from emulated import A100, H100, TENSOR_CORES, Limits, emulated_operators, plan
from helpers import NAN, assert_same_bits, make_problem
from latent_problems import make_latents
from test_cuda_errors import message_of

BF16, FP16 = torch.bfloat16, torch.float16
KINDS = ["all", "ragged", "left padded", "causal", "window", "random"]
ADA = Limits(142, 100 << 10, 99 << 10)
by_dtype = pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])


CASES = {
    "16 heads": {},
    "one key": {"seqlen_k": 1},
    "no keys": {"seqlen_k": 0},
    "31 keys": {"seqlen_k": 31},
    "33 keys": {"seqlen_k": 33},
    "20 heads": {"group_size": 20, "seqlen_k": 300},
    "64 heads": {"group_size": 64, "seqlen_k": 100},
    "128 heads": {"group_size": 128, "seqlen_k": 100},
    "128 heads, one key": {"group_size": 128, "seqlen_k": 1},
    "two kv heads": {"num_heads_kv": 2, "group_size": 3, "layout": "BSHD", "batch": 2},
    "ragged": {"ranges": "ragged", "batch": 3, "layout": "padded"},
    "left padded, 40 rows": {"ranges": "left padded", "batch": 2, "seqlen_q": 2, "group_size": 20},
    "causal": {"ranges": "causal", "seqlen_q": 3, "seqlen_k": 120},
    "window": {"ranges": "window", "seqlen_q": 5, "seqlen_k": 300},
    "random": {"ranges": "random", "seqlen_q": 4, "seqlen_k": 200},
    "softcap": {"softcap": 3.0, "alibi": 1 / 64, "seqlen_q": 2},
    "large scores": {"score_size": 40.0},
    "pages of 1": {"page_size": 1, "seqlen_k": 70},
    "pages of 16, 64 rows": {"page_size": 16, "group_size": 64, "seqlen_k": 90, "batch": 2},
    "pages of 24, ragged": {"page_size": 24, "ranges": "ragged", "batch": 2},
    "MiniCPM3's columns": {"head_dim": 288, "head_dim_v": 256, "group_size": 40},
    "few values": {"head_dim": 520, "head_dim_v": 8},
    "as many values": {"head_dim": 264, "head_dim_v": 264},
}  # fmt: skip


@by_dtype
@pytest.mark.parametrize("name", CASES)
def test_exact(name, dtype, cuda_kernels):
    problem = make_latents(dtype=dtype, **CASES[name]).to(cuda_kernels)
    for num_workers in (1, 5):
        result = problem.run_and_check(num_workers=num_workers)
        assert_same_bits(result, problem.run(num_workers=num_workers))


@st.composite
def latents(draw):
    torch.manual_seed(draw(st.integers(0, 2**31)))
    page_size = draw(st.integers(1, 70)) if draw(st.booleans()) else 0
    columns = draw(st.sampled_from([576, 8 * draw(st.integers(33, 72))]))
    return make_latents(
        batch=draw(st.integers(1, 3)),
        num_heads_kv=draw(st.sampled_from([1, 1, 2])),
        group_size=draw(st.sampled_from([1, 5, 16, 20, 64])),
        seqlen_q=draw(st.sampled_from([1, 1, 2, 5])),
        seqlen_k=draw(st.integers(0, 200)),
        head_dim=columns,
        head_dim_v=min(columns, draw(st.sampled_from([512, 8 * draw(st.integers(1, 64))]))),
        dtype=draw(st.sampled_from([BF16, FP16])),
        ranges=draw(
            st.sampled_from(["all", "ragged", "left padded", "causal", "window", "random"])
        ),
        layout=draw(st.sampled_from(["BHSD", "BSHD", "padded"])),
        page_size=page_size,
        alibi=draw(st.sampled_from([0.0, 1 / 64])),
        softcap=draw(st.sampled_from([0.0, 0.0, 3.0])),
    )


@settings(max_examples=40)
@given(latents(), st.sampled_from([0, 0, 1, 2, 3, 5, 16, 40]), st.integers())
def test_any_latents_in_any_order_of_blocks(problem, num_workers, seed):
    with emulated_operators(0):
        result = problem.run_and_check(num_workers=num_workers)
    with emulated_operators(seed % 2**32):
        assert_same_bits(result, problem.run(num_workers=num_workers))


@pytest.mark.parametrize("heads", [16, 128])
def test_bits_do_not_depend_on_where_keys_lie(heads, cuda_kernels):
    bits = []
    for layout, page_size in [("BHSD", 0), ("padded", 0), ("BHSD", 48), ("BHSD", 5)]:
        torch.manual_seed(5)
        problem = make_latents(group_size=heads, seqlen_k=240, layout=layout, page_size=page_size)
        bits.append(problem.to(cuda_kernels).run_and_check(num_workers=2))
    for other in bits[1:]:
        assert_same_bits(other, bits[0])


@pytest.mark.parametrize("model", TENSOR_CORES)
def test_emulated_tensor_cores_that_round_to_zero(model):
    problem = make_latents(seqlen_k=200)
    with emulated_operators(3, tensor_core=TENSOR_CORES[model]):
        problem.run_and_check(num_workers=2)


def test_a_nan_reaches_the_rows_that_see_it(cuda_kernels):
    problem = make_latents(seqlen_q=2, seqlen_k=200)
    problem.key_ranges = torch.tensor([[[0, 100], [0, 200]]], dtype=torch.int32)
    problem.k[0, 0, 150, 570] = NAN  # of a column that values do not have
    o, lse = problem.to(cuda_kernels).run_and_check(num_workers=1)
    assert lse.isnan().sum() == 16 and o[:, :, 0].isfinite().all() and o[:, :, 1].isnan().all()


def test_plans_fit_the_shared_memory():
    """Two blocks share a multiprocessor of a Hopper with 16 rows; an Ada has room for no more."""
    shapes = {
        (H100, 16): (16, 128, 2, 2), (H100, 17): (64, 256, 1, 3), (H100, 128): (64, 256, 1, 3),
        (A100, 16): (16, 128, 1, 3), (A100, 64): (64, 256, 1, 2), (ADA, 64): (16, 128, 1, 2),
    }  # fmt: skip
    for (limits, rows), expected in shapes.items():
        made = plan(BF16, 576, rows, limits)
        assert (made.row_tile, made.num_threads, made.blocks_per_sm, made.num_stages) == expected
        assert made.shared_bytes <= limits.shared_bytes_per_block


def test_a_device_with_less_shared_memory():
    """Rows of 64 heads are then four outputs."""
    problem = make_latents(group_size=64, seqlen_k=130, ranges="ragged", batch=2)
    with emulated_operators(7, ADA):
        problem.run_and_check()


REFUSED = {
    "columns": (
        {"head_dim": 584}, "head_dim must be a multiple of 8 up to 576 on CUDA for values that are "
        "the first columns of their keys, got 584",
    ),
    "columns of 16 bytes": (
        {"head_dim": 572, "layout": "padded"}, "head_dim must be a multiple of 8 up to 576 on CUDA "
        "for values that are the first columns of their keys, got 572",
    ),
    "values": (
        {"head_dim_v": 520}, "head_dim of v must be a multiple of 8 up to 512 on CUDA for values "
        "that are the first columns of their keys, got 520",
    ),
    "float32": (
        {"dtype": torch.float32}, "q must be bfloat16 or float16 on CUDA for latents of more than "
        "256 columns, got float32",
    ),
    "8 bits": (
        {"kv_dtype": torch.int8}, "k must have the dtype of q on CUDA for latents of more than 256 "
        "columns, got 8 bits",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case, cuda_kernels):
    changes, message = REFUSED[case]
    problem = make_latents(**changes).to(cuda_kernels)
    assert message_of(problem.run) == f"lean_decode: {message}"


@pytest.mark.parametrize("seqlen_k", [0, 40])
def test_values_of_their_own_are_refused(seqlen_k, cuda_kernels):
    """With as many columns, and where they begin with the keys but go on otherwise."""
    message = (
        "lean_decode: head_dim must be a multiple of 8 up to 256 on CUDA, got 576; more are taken "
        "where v is a view of the first columns of k"
    )
    problem = make_problem(
        head_dim=576, head_dim_v=512, num_heads_kv=1, dtype=BF16, seqlen_k=seqlen_k
    ).to(cuda_kernels)
    assert message_of(problem.run) == message
    problem.v = torch.zeros_like(problem.k)
    assert message_of(problem.run) == message
    problem.k = torch.zeros(2, 1, 2 * seqlen_k, 576, dtype=BF16, device=cuda_kernels)[:, :, ::2]
    problem.v = problem.k.as_strided((2, 1, seqlen_k, 512), (problem.k.stride(0), 0, 576, 1))
    assert message_of(problem.run) == message
