# SPDX-License-Identifier: BSD-3-Clause
"""Every kernel that is compiled: element types, head_dim buckets, row tiles, and any mix."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dry_device import sized
from emulated import Limits, emulated_operators, plan
from helpers import assert_same_bits, make_problem
from tree_attention import lean_decode

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])


@by_dtype
@pytest.mark.parametrize("head_dim", range(8, 257, 8))
def test_head_dims(head_dim, dtype, cuda_kernels):
    """Buckets and what is narrower: columns beyond head_dim are neither read nor written."""
    problem = make_problem(
        head_dim=head_dim, seqlen_q=2, ranges="causal", layout="padded", dtype=dtype, seqlen_k=300
    )
    problem.to(cuda_kernels).run_and_check()


@by_dtype
@pytest.mark.parametrize(
    "head_dim, head_dim_v", [(64, 128), (128, 64), (192, 128), (256, 8), (8, 256), (96, 72)]
)
def test_values_of_another_head_dim(head_dim, head_dim_v, dtype, cuda_kernels):
    problem = make_problem(head_dim=head_dim, head_dim_v=head_dim_v, dtype=dtype, layout="padded")
    problem.to(cuda_kernels).run_and_check(num_workers=7)


@by_dtype
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("rows", [1, 15, 16, 17, 32, 33, 64, 65, 127, 128, 129, 300])
def test_row_tiles(rows, head_dim, dtype, cuda):
    seqlen_k = 400 if torch.cuda.is_available() else 160  # the emulator takes seconds for 400
    problem = make_problem(
        num_heads_kv=1, group_size=1, seqlen_q=rows, seqlen_k=seqlen_k, ranges="causal",
        head_dim=head_dim, dtype=dtype,
    ).to(cuda)  # fmt: skip
    for num_workers in (1, 5):
        problem.run_and_check(num_workers=num_workers)


def test_many_keys_of_one_block_in_float32(cuda_kernels):
    """Scores near zero make o small beside what its sum goes through."""
    problem = make_problem(num_heads_kv=1, group_size=8, seqlen_k=16 << 10, dtype=torch.float32)
    problem.q *= 0.1
    problem.to(cuda_kernels).run_and_check(num_workers=1)


RINGS = {(1, 2): 100, (1, 3): 130, (1, 4): 145, (2, 2): 163, (2, 3): 227}


@by_dtype
@pytest.mark.parametrize("blocks, stages", RINGS)
def test_rings_of_all_depths(blocks, stages, dtype):
    """Blocks of a multiprocessor, and stages of the ring of each, by the memory that it has."""
    kib = RINGS[blocks, stages]
    limits = Limits(3, (kib + 1) << 10, kib << 10)
    planned = plan(dtype, 64, 12, limits)
    assert (planned.blocks_per_sm, planned.num_stages) == (blocks, stages)
    problem = make_problem(batch=3, seqlen_q=3, seqlen_k=900, ranges="ragged", dtype=dtype)
    with emulated_operators(kib, limits):
        problem.run_and_check()


KINDS = ["all", "ragged", "left padded", "causal", "window", "random"]


@st.composite
def problems(draw, lengths=(64, 65, 512, 3000)):
    torch.manual_seed(draw(st.integers(0, 2**31)))
    page_size = draw(st.integers(1, 70)) if draw(st.booleans()) else 0
    multiples_of_8 = st.integers(1, 32).map(lambda n: 8 * n)
    seqlen_k = draw(st.one_of(st.integers(0, 700), st.sampled_from(lengths)))
    # Scores of a hundred in 16 bits are no yardstick.
    slope = 1 / 64 if seqlen_k <= 700 else 1 / 1024
    return make_problem(
        batch=draw(st.integers(1, 4)),
        num_heads_kv=draw(st.integers(1, 3)),
        group_size=draw(st.sampled_from([1, 2, 3, 4, 5, 7, 8, 16])),
        seqlen_q=draw(st.sampled_from([1, 1, 2, 3, 5, 9, 20])),
        seqlen_k=seqlen_k,
        head_dim=draw(st.one_of(st.sampled_from([64, 128]), multiples_of_8)),
        head_dim_v=draw(st.one_of(st.none(), multiples_of_8)),
        dtype=draw(st.sampled_from(DTYPES)),
        ranges=draw(st.sampled_from(KINDS)),
        layout=draw(st.sampled_from(["BHSD", "BSHD", "padded"])),
        page_size=page_size,
        per_head=bool(page_size) and draw(st.booleans()),
        alibi=draw(st.sampled_from([0.0, slope])),
        softcap=draw(st.sampled_from([0.0, 0.0, 3.0, 50.0])),
        softmax_scale=draw(st.sampled_from([None, None, 0.05, 0.3])),
    )


@settings(max_examples=80)
@given(problems(lengths=(64, 65, 512)), st.sampled_from([0, 0, 1, 2, 3, 5, 16, 40]), st.integers())
def test_any_problem_in_any_order_of_blocks(problem, num_workers, seed):
    """Emulated: the seed decides which block runs when."""
    with emulated_operators(0):
        result = problem.run_and_check(num_workers=num_workers)
    with emulated_operators(seed % 2**32):
        assert_same_bits(result, problem.run(num_workers=num_workers))


# The fixture only says whether there is a device.
@settings(max_examples=sized(400), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(problems(), st.sampled_from([0, 0, 1, 2, 3, 5, 16, 40, 300]))
def test_any_problem_with_any_workers(cuda, problem, num_workers):
    problem = problem.to(cuda)
    result = problem.run_and_check(num_workers=num_workers)
    assert_same_bits(result, problem.run(num_workers=num_workers))


@pytest.mark.parametrize("num_workers", [0, 1, 5, 40])
@pytest.mark.parametrize(
    "shape",
    [
        {"batch": 1, "num_heads_kv": 1, "seqlen_k": 1000},
        {"batch": 3, "num_heads_kv": 2, "seqlen_k": 129, "seqlen_q": 3},
        {"batch": 40, "num_heads_kv": 3, "seqlen_k": 70},
        {"batch": 2, "num_heads_kv": 1, "seqlen_k": 0},
        {"batch": 2, "num_heads_kv": 2, "seqlen_k": 300, "seqlen_q": 12},
    ],
    ids=lambda shape: "-".join(map(str, shape.values())),
)
def test_the_line_of_the_host_is_that_of_the_device(shape, num_workers, cuda_kernels):
    """Without ranges the host cuts it; with ranges of all keys every block does."""
    problem = make_problem(**shape, dtype=torch.bfloat16).to(cuda_kernels)
    result = problem.run_and_check(num_workers=num_workers)
    batch, seqlen_q, seqlen_k = shape["batch"], shape.get("seqlen_q", 1), shape["seqlen_k"]
    ranges = torch.tensor([0, seqlen_k], dtype=torch.int32, device=cuda_kernels)
    options = problem.options | {"num_workers": num_workers}
    o, lse = lean_decode(
        problem.q, problem.k, problem.v, ranges.expand(batch, seqlen_q, 2).contiguous(), **options
    )
    assert_same_bits((o, lse), result)
