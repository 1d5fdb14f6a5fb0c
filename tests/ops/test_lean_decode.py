# SPDX-License-Identifier: BSD-3-Clause
"""lean_decode against the float64 reference, one named case per line."""

import math

import pytest
import torch

from helpers import NAN, Problem, assert_same_bits, make_problem, rounds_weights
from tiers import tiers
from tree_attention import lean_decode

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])


@by_dtype
@pytest.mark.parametrize("seqlen_k", [0, 1, 2, 63, 64, 65, 127, 128, 129, 1000])
def test_lengths_around_tiles(seqlen_k, dtype, device):
    o, lse = make_problem(seqlen_k=seqlen_k, dtype=dtype).to(device).run_and_check()
    assert o.dtype == dtype
    if seqlen_k == 0:
        assert (o == 0).all() and (lse == -math.inf).all()


@by_dtype
@pytest.mark.parametrize("group_size", [1, 3, 4, 5, 7, 8, 16])
def test_groups(group_size, dtype, device):
    problem = make_problem(group_size=group_size, seqlen_q=2, ranges="causal", dtype=dtype)
    problem.to(device).run_and_check()


@by_dtype
@pytest.mark.parametrize(
    "head_dim, head_dim_v",
    [(1, 1), (2, 5), (7, 3), (17, 33), (31, 31), (64, 64), (80, 80), (96, 96), (128, 128),
     (256, 256), (64, 128), (192, 128), (100, 8), (576, 512)],
)  # fmt: skip
def test_head_dims(head_dim, head_dim_v, dtype):
    """The CPU takes any; those of CUDA: test_cuda_shapes.py."""
    make_problem(
        head_dim=head_dim, head_dim_v=head_dim_v, num_heads_kv=3, seqlen_q=2, dtype=dtype
    ).run_and_check()


@pytest.mark.parametrize("seqlen_q", tiers([*range(1, 18)], [40, 130]))
def test_query_rows(seqlen_q, device):
    problem = make_problem(
        seqlen_q=seqlen_q, group_size=3, seqlen_k=200, ranges="causal", head_dim=32, layout="BSHD",
        num_heads_kv=1,
    )  # fmt: skip
    problem.to(device).run_and_check()


@by_dtype
@pytest.mark.parametrize("layout", tiers(["padded"], ["BHSD", "BSHD"]))
@pytest.mark.parametrize("ranges", ["ragged", "left padded", "causal", "window", "random"])
def test_ranges_and_strides(ranges, layout, dtype, device):
    problem = make_problem(
        batch=3, seqlen_q=6, seqlen_k=300, ranges=ranges, layout=layout, dtype=dtype
    )
    assert problem.k.isnan().any(), "some keys are hidden from every query"
    problem.to(device).run_and_check()


@by_dtype
@pytest.mark.parametrize("ranges", ["ragged", "random"])
def test_rows_that_begin_anywhere(ranges, dtype):
    """The CPU takes them, CUDA refuses."""
    make_problem(
        batch=3, seqlen_q=6, seqlen_k=300, ranges=ranges, layout="unaligned", dtype=dtype
    ).run_and_check()


@by_dtype
@pytest.mark.parametrize("per_head", [False, True], ids=["shared pages", "pages per head"])
@pytest.mark.parametrize("page_size", tiers([1, 7, 16], [64, 256]))
def test_pages(page_size, per_head, dtype, device):
    problem = make_problem(
        batch=3, seqlen_q=3, seqlen_k=max(210, 3 * page_size), ranges="random", layout="BSHD",
        dtype=dtype, page_size=page_size, per_head=per_head,
    )  # fmt: skip
    table = problem.options["page_table"]
    assert table.dim() == 2 + per_head and (table.diff() != 1).any(), "pages are out of order"
    problem.to(device).run_and_check()


def test_page_entries_past_a_range_are_never_read(device):
    problem = make_problem(seqlen_k=100, page_size=10, seqlen_q=2)
    problem.key_ranges = torch.tensor([[[20, 35], [25, 40]], [[0, 0], [99, 90]]]).int()
    problem.options["page_table"][0, :2] = 2**31 - 1
    problem.options["page_table"][0, 4:] = -1
    problem.options["page_table"][1] = 2**31 - 1
    problem.to(device).run_and_check()


SCORE_TERMS = {
    "scale": {"softmax_scale": 0.37},
    "negative scale": {"softmax_scale": -0.2},
    "zero scale": {"softmax_scale": 0.0},
    "softcap": {"softcap": 2.0},
    "softcap far above the scores": {"softcap": 500.0},
    "softcap saturated": {"softcap": 30.0, "score_size": 40.0},
    "alibi": {"alibi": 1 / 64},
    "alibi on one block": {"alibi": 1 / 64, "key_layout": (0, 1, 1)},
    "alibi and softcap": {"alibi": 1 / 64, "softcap": 3.0, "softmax_scale": 0.5},
    "all on pages": {"alibi": 1 / 64, "softcap": 3.0, "softmax_scale": 0.5, "page_size": 16},
}


@by_dtype
@pytest.mark.parametrize("name", SCORE_TERMS)
def test_score_terms(name, dtype, device):
    problem = make_problem(
        seqlen_q=3, seqlen_k=300, ranges="causal", dtype=dtype, **SCORE_TERMS[name]
    ).to(device)
    o, _ = problem.run_and_check()
    problem.options = {"page_table": problem.options.get("page_table")}
    without, _ = problem.run()
    assert (o - without).abs().max() > 0.01 or name == "softcap far above the scores"


@pytest.mark.parametrize("sign", [1, -1])
def test_scores_of_ten_thousand_stay_finite(sign, device):
    """exp would overflow, and the smallest scores underflow against the largest."""
    problem = make_problem(score_size=1e4, seqlen_k=500)
    scores = problem.q @ problem.k.repeat_interleave(4, 1).mT / 8
    assert scores.max() > 2e4 and scores.exp().isinf().any()
    o, lse = problem.to(device).run_and_check(num_workers=3)
    assert o.isfinite().all() and lse.isfinite().all()
    # All scores near one huge value: the softmax is as flat as that of the small differences.
    shift = sign * 1e4
    problem = make_problem(head_dim=72, seqlen_k=500, softmax_scale=1 / 8)
    problem.q[..., 64:], problem.k[..., 64] = 0.0, 8.0 * shift
    problem.q[..., 64] = 1.0
    o, lse = problem.to(device).run_and_check(num_workers=3)
    assert ((lse - shift).abs() < 20).all()


@by_dtype
@pytest.mark.parametrize("out_dtype", DTYPES, ids=lambda dtype: f"to {str(dtype)[6:]}")
def test_out_dtype(dtype, out_dtype, device):
    problem = make_problem(dtype=dtype, seqlen_q=2).to(device)
    o, lse = problem.run_and_check(out_dtype=out_dtype)
    assert o.dtype == out_dtype
    in_float32, lse_again = problem.run(out_dtype=torch.float32)
    assert_same_bits((lse,), (lse_again,))
    if not rounds_weights(o):
        assert_same_bits((o,), (in_float32.to(out_dtype),))  # rounded once, at the end


@pytest.mark.parametrize("num_workers", [1, 2, 3, 4, 5, 7, 8, 16, 17, 31, 64, 257, 2**31 - 1])
def test_workers_split_the_line_anywhere(num_workers, device):
    """Outputs of very different length: some workers hold several, some share one."""
    problem = make_problem(batch=4, seqlen_k=900, seqlen_q=2, num_heads_kv=2, group_size=2)
    problem.key_ranges = torch.tensor([[0, 900], [3, 4], [0, 0], [100, 700]]).int()
    problem.key_ranges = problem.key_ranges[:, None].repeat(1, 2, 1)
    problem = problem.to(device)
    first = problem.run_and_check(num_workers=num_workers)
    assert_same_bits(first, problem.run(num_workers=num_workers))


@pytest.mark.parametrize("num_workers", [1, 2, 5, 64])
def test_bits_do_not_depend_on_threads(num_workers):
    problem = make_problem(batch=3, seqlen_k=2000, seqlen_q=3, ranges="random")
    results, before = [], torch.get_num_threads()
    try:
        for num_threads in (1, 2, 5):
            torch.set_num_threads(num_threads)
            results.append(problem.run_and_check(num_workers=num_workers))
    finally:
        torch.set_num_threads(before)
    for result in results[1:]:
        assert_same_bits(result, results[0])


def test_long_call_has_more_workers_than_threads():
    """2,188 tiles: two threads have four workers of 256 tiles or more each, as they may share."""
    problem = make_problem(batch=1, num_heads_kv=2, group_size=1, seqlen_k=70_000, head_dim=8)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        result = problem.run_and_check()
    finally:
        torch.set_num_threads(before)
    assert_same_bits(result, problem.run(num_workers=8))


def test_bits_do_not_depend_on_strides_or_pages(device):
    bits = []
    for layout, page_size in [("BHSD", 0), ("BSHD", 0), ("padded", 0), ("BHSD", 48), ("BSHD", 64)]:
        torch.manual_seed(5)
        problem = make_problem(seqlen_k=2200, layout=layout, page_size=page_size, seqlen_q=2)
        bits.append(problem.to(device).run_and_check(num_workers=3))
    for other in bits[1:]:
        assert_same_bits(other, bits[0])


def test_broadcast_inputs(device):
    """Stride 0 on batch, heads and queries."""
    problem = make_problem(batch=1, num_heads_kv=1, group_size=1).to(device)
    q, k, v = (
        problem.q.expand(2, 6, 3, -1),
        *(x.expand(2, 3, -1, -1) for x in (problem.k, problem.v)),
    )
    ranges = torch.tensor([2, 140], dtype=torch.int32, device=device).expand(2, 3, 2)
    assert q.stride()[:3] == (*k.stride()[:2], 0) == (0, 0, 0)
    _, lse = Problem(q, k, v, ranges).run_and_check()
    assert (lse == lse[0, 0, 0]).all()


def test_offsets_beyond_32_bits():
    """Elements far apart in 4 GiB of address space, of which only the used pages exist."""
    stride = 2**31 + 64
    storage = torch.empty(stride + 70 * 8, dtype=torch.float16)
    k = storage.as_strided((2, 1, 70, 8), (stride, 8, 8, 1)).normal_()
    q = torch.randn(2, 1, 1, 8, dtype=torch.float16)
    Problem(q, k, k).run_and_check()
    table = torch.tensor([[1], [0]], dtype=torch.int32)
    o, lse = lean_decode(q, k, k, page_table=table)
    assert_same_bits((o, lse), lean_decode(q, k.flip(0), k.flip(0)))


@pytest.mark.parametrize("shape", [(0, 4, 2), (2, 0, 2), (2, 4, 0)], ids=["batch", "heads", "rows"])
def test_nothing_to_compute(shape, device):
    k = torch.randn(shape[0], 2, 50, 64, device=device)
    o, lse = lean_decode(torch.randn(*shape, 64, device=device), k, k)
    assert o.shape == (*shape, 64) and lse.shape == shape


def test_nan_reaches_only_the_rows_that_see_it(device):
    problem = make_problem(seqlen_q=3, seqlen_k=200)
    problem.key_ranges = torch.tensor([[0, 150], [100, 200], [151, 200]]).int().repeat(2, 1, 1)
    problem.q[0, 1, 2] = NAN  # one query row
    problem.k[1, 0, 120] = NAN  # seen by queries 0 and 1 of the first four heads of sequence 1
    problem = problem.to(device)
    for num_workers in (1, 4):
        o, lse = problem.run_and_check(num_workers=num_workers)
        rows = lse.isnan()
        assert rows.sum() == 1 + 4 * 2 and rows[0, 1, 2] and rows[1, :4, :2].all()
        assert o.isnan().sum() == 64 * rows.sum()


@pytest.mark.parametrize("seen_by", ["every query", "some queries"])
def test_nan_of_values(seen_by, device, request):
    """On CUDA the queries of a step share products of weights, zeros among them, and values."""
    if seen_by == "some queries" and request.node.callspec.params["device"] != "cpu":
        pytest.skip("not promised on CUDA")
    problem = make_problem(seqlen_q=3, seqlen_k=200)
    first = 0 if seen_by == "every query" else 1
    ranges = [[100 * (i >= first), 200 if i >= first else 150] for i in range(3)]
    problem.key_ranges = torch.tensor(ranges).int().repeat(2, 1, 1)
    problem.v[1, 1, 190, 5] = NAN  # one column
    problem = problem.to(device)
    for num_workers in (1, 4):
        o, lse = problem.run_and_check(num_workers=num_workers)
        assert lse.isfinite().all()
        assert o.isnan().sum() == 4 * (3 - first) and o[1, 4:, first:, 5].isnan().all()


@by_dtype
def test_keys_between_the_ranges_of_two_queries(dtype, device):
    """What neither sees may be anything, though kernels fetch it with what both see."""
    problem = make_problem(seqlen_q=2, seqlen_k=200, dtype=dtype)
    problem.key_ranges = torch.tensor([[0, 10], [100, 180]]).int().repeat(2, 1, 1)
    for x in (problem.k, problem.v):
        x[:, :, 10:100] = x[:, :, 180:] = NAN
    o, _ = problem.to(device).run_and_check(num_workers=3)
    assert o.isfinite().all()


@pytest.mark.parametrize("view", ["expanded", "transposed", "sliced"])
def test_query_positions_of_any_strides(view, device):
    """As one row for all sequences, for example, they were read past their end."""
    problem = make_problem(batch=3, seqlen_q=4, alibi=0.5)
    if view == "expanded":
        positions = torch.randint(150, (4,)).expand(3, 4)
    elif view == "transposed":
        positions = torch.randint(150, (4, 3)).T
    else:
        positions = torch.randint(150, (3, 11))[:, 1:9:2]
    problem.options["query_positions"] = positions
    problem.to(device).run_and_check(num_workers=2)


def test_alibi_positions_beyond_32_bits(device):
    """Distances are exact integers; positions of this size are not, in float32."""
    problem = make_problem(seqlen_q=2, seqlen_k=200, alibi=0.5, key_layout=(2**33, 16, 48))
    problem.options["query_positions"] += 2**33 + 500
    assert len(problem.options["query_positions"].unique()) > 1
    problem.to(device).run_and_check(num_workers=3)


def test_one_worker_for_each_output_is_no_split(device):
    """Boundaries of workers on boundaries of outputs: FlashAttention-2's schedule, and its bits."""
    problem = make_problem(batch=3, num_heads_kv=2, seqlen_k=64 * 6).to(device)
    whole = problem.run(num_workers=1)
    for num_workers in (2, 3, 6):
        assert_same_bits(problem.run(num_workers=num_workers), whole)
    split = problem.run(num_workers=12)
    assert not torch.equal(split[0], whole[0]), "a real split rounds differently"
