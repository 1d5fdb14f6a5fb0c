# SPDX-License-Identifier: BSD-3-Clause
"""Latent attention: one kv head whose values are the first columns of its keys."""

from itertools import product

import pytest
import torch

from helpers import NAN, assert_same_bits
from latent_problems import make_latents
from pairwise import each_value
from tiers import tiers, tiers_of
from tree_attention import append_kv, lean_decode, reference

pytestmark = pytest.mark.usefixtures("instruction_set")
BF16, INT8, FLOAT8 = torch.bfloat16, torch.int8, torch.float8_e4m3fn


CASES = {
    "16 heads": {},
    "16 heads, several windows of fetching": {"seqlen_k": 2600},
    "40 heads": {"group_size": 40, "seqlen_k": 300},
    "64 heads": {"group_size": 64, "seqlen_k": 300},
    "128 heads": {"group_size": 128, "seqlen_k": 700},
    "128 heads, several flushes": {"group_size": 128, "seqlen_k": 4500},
    "128 heads, one key": {"group_size": 128, "seqlen_k": 1},
    "128 heads, no keys": {"group_size": 128, "seqlen_k": 0},
    "128 heads, ragged": {"group_size": 128, "ranges": "ragged", "batch": 3, "layout": "padded"},
    "128 heads, causal": {"group_size": 128, "ranges": "causal", "seqlen_q": 3, "seqlen_k": 520},
    "128 heads, window": {"group_size": 128, "ranges": "window", "seqlen_q": 5, "seqlen_k": 300},
    "128 heads, random": {"group_size": 128, "ranges": "random", "seqlen_q": 4, "seqlen_k": 300},
    "128 heads, pages of 16": {"group_size": 128, "page_size": 16, "seqlen_k": 390},
    "128 heads, pages of 24": {"group_size": 128, "page_size": 24, "seqlen_k": 390, "batch": 2},
    "128 heads, unaligned": {"group_size": 128, "layout": "unaligned", "seqlen_k": 300},
    "few columns": {"head_dim": 48, "head_dim_v": 32, "batch": 2, "ranges": "ragged"},
    "few columns, many rows": {
        "head_dim": 96, "head_dim_v": 64, "seqlen_q": 20, "ranges": "causal", "page_size": 16,
    },
    "rope of 8": {"head_dim": 40, "head_dim_v": 32, "group_size": 128, "seqlen_k": 300},
}  # fmt: skip


OF_DTYPES = [*product(CASES, (None, INT8, FLOAT8))]
QUICK = [x for x in each_value(OF_DTYPES) if "several" not in x[0]]


@pytest.mark.parametrize("name, kv_dtype", tiers_of(OF_DTYPES, quick=QUICK))
def test_exact(name, kv_dtype):
    problem = make_latents(kv_dtype=kv_dtype, **CASES[name])
    for num_workers in (1, 3):
        result = problem.run_and_check(num_workers=num_workers)
        assert_same_bits(result, problem.run(num_workers=num_workers))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes(dtype):
    make_latents(dtype=dtype, group_size=128, seqlen_k=300).run_and_check(num_workers=2)


@pytest.mark.parametrize("kv_dtype", tiers([None], [INT8]), ids=["16 bits", "int8"])
def test_bits_do_not_depend_on_where_keys_lie(kv_dtype):
    """Regular rows are read where they lie, others are copied; values are packed from either."""
    bits = []
    for layout, page_size in [("BHSD", 0), ("padded", 0), ("BHSD", 48), ("BHSD", 5)]:
        torch.manual_seed(5)
        problem = make_latents(
            kv_dtype=kv_dtype, group_size=128, seqlen_k=600, layout=layout, page_size=page_size
        )
        bits.append(problem.run_and_check(num_workers=2))
        separate = problem.v.clone()
        problem.v = separate
        assert_same_bits(problem.run(num_workers=2), bits[-1])
    for other in bits[1:]:
        assert_same_bits(other, bits[0])


@pytest.mark.parametrize("group_size", [16, 128])
@pytest.mark.parametrize("size", [300.0, 1000.0, 1e4])
def test_scores_far_below_zero(group_size, size):
    """A row whose scores are all below -2^22 has keys all the same. One worker: such scores have
    rounding errors that change weights, where two of them compute in different ways."""
    q = torch.full((1, group_size, 1, 64), -size, dtype=BF16)
    k, v = torch.full((1, 1, 300, 64), size, dtype=BF16), torch.randn(1, 1, 300, 64).to(BF16)
    o, lse = lean_decode(q, k, v, num_workers=1)
    true_o, true_lse = reference.attention(q, k, v)
    torch.testing.assert_close(o.double(), true_o, rtol=1e-2, atol=1e-3)
    torch.testing.assert_close(lse.double(), true_lse, rtol=1e-6, atol=0)


def test_a_nan_reaches_the_rows_that_see_it():
    problem = make_latents(group_size=128, seqlen_q=2, seqlen_k=600)
    problem.key_ranges = torch.tensor([[[0, 500], [0, 600]]], dtype=torch.int32)
    problem.k[0, 0, 550, 570] = NAN  # of a column that values do not have
    o, lse = problem.run_and_check(num_workers=1)
    assert lse.isnan().sum() == 128 and o[:, :, 0].isfinite().all() and o[:, :, 1].isnan().all()


@pytest.mark.parametrize("kv_dtype", [BF16, INT8, FLOAT8], ids=lambda dtype: str(dtype)[6:])
def test_what_is_appended_is_what_attention_reads(kv_dtype):
    """The latents are written once: there are no values beside them."""
    latents, q = torch.randn(2, 1, 40, 576).to(BF16), torch.randn(2, 128, 1, 576).to(BF16)
    cache = torch.full((2, 1, 64, 576), 5.0).to(kv_dtype)
    scaled = kv_dtype != BF16
    scale = torch.full((2, 1, 64), NAN) if scaled else None
    for begin, end in ((0, 30), (30, 31), (31, 40)):
        slots = torch.arange(begin, end).expand(2, -1)
        append_kv(latents[:, :, begin:end], None, cache, None, slots, k_scale=scale)
    assert (cache[:, :, 40:].float() == 5).all()
    k, k_scale = reference.quantise(latents, kv_dtype) if scaled else (latents, None)
    ranges = torch.tensor([0, 40]).int().repeat(2, 1, 1)
    result = lean_decode(q, cache, cache[..., :512], ranges, k_scale=scale, v_scale=scale)
    expected = lean_decode(q, k, k[..., :512], k_scale=k_scale, v_scale=k_scale)
    for x, y in zip(result, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-2, atol=1e-3)
