# SPDX-License-Identifier: BSD-3-Clause
"""Long contexts on CUDA against float64 on the same device, tensors past 2^31 elements, and scores
of any size."""

import math

import pytest
import torch
from torch import Tensor

from benchmarks.harness.accuracy import Float64Check
from dry_device import sized
from helpers import NAN
from tree_attention import lean_decode

BF16 = torch.bfloat16
DTYPES = [torch.float32, BF16, torch.float16]
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])


def need_memory(num_bytes: int) -> None:
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    if free < num_bytes:
        pytest.skip(f"needs {num_bytes >> 20} MiB of GPU memory, {free >> 20} are free")


def random_inputs(
    device: torch.device, dtype: torch.dtype, keys: int, *, heads: tuple[int, int] = (8, 2),
    head_dim: int = 128, seqlen_q: int = 1, score_size: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    q = score_size * torch.randn(1, heads[0], seqlen_q, head_dim, device=device)
    k, v = (torch.randn(1, heads[1], keys, head_dim, device=device).to(dtype) for _ in range(2))
    return q.to(dtype), k, v


def check(
    q: Tensor, k: Tensor, v: Tensor, ranges: Tensor | None = None, *, o_limit: float = 0.5,
    **options: object,
) -> None:  # fmt: skip
    """`o_limit` is for scores at which plain PyTorch in 16 bits is no yardstick."""
    reference = Float64Check(q, k, v, ranges, **options)
    for num_workers in (0, 37):
        o, lse = lean_decode(q, k, v, ranges, num_workers=num_workers, **options)
        accuracy = reference.accuracy(o, lse)
        assert accuracy.right and accuracy.o_error < o_limit, accuracy


@by_dtype
@pytest.mark.parametrize("score_size", [0.1, 1.0, 20.0], ids=["flat", "normal", "peaked"])
@pytest.mark.parametrize("keys", [sized(128 << 10), sized(1 << 20)], ids=["128k", "1M"])
def test_long_contexts(keys, score_size, dtype, cuda):
    need_memory(12 << 30)
    check(*random_inputs(cuda, dtype, keys, score_size=score_size))


@by_dtype
def test_several_queries_of_a_long_context(dtype, cuda):
    need_memory(12 << 30)
    keys, seqlen_q = sized(128 << 10), 5
    q, k, v = random_inputs(cuda, dtype, keys, seqlen_q=seqlen_q, heads=(28, 4))
    ends = torch.arange(keys - seqlen_q + 1, keys + 1, device=cuda)
    ranges = torch.stack([ends - sized(100_001), ends], -1)[None].int()
    check(q, k, v, ranges)


@by_dtype
@pytest.mark.parametrize("sign", [1, -1])
def test_scores_of_thousands(sign, dtype, cuda):
    """First all near one huge value, so that the softmax is as flat as that of the differences;
    then far apart. Scores in 16 bits would be off by up to 32."""
    q, k, v = random_inputs(cuda, dtype, sized(50_000), head_dim=64)
    q[..., 0], k[..., 0] = 256.0, sign * 240.0  # as much as float16 holds before the scale of 1 / 8
    lse = lean_decode(q, k, v)[1]
    assert ((lse - sign * 256 * 240 / 8).abs() < 20).all()
    check(q, k, v, o_limit=0.01)
    check(*random_inputs(cuda, dtype, sized(50_000), head_dim=64, score_size=1e3), o_limit=0.01)


@by_dtype
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("size", [6e7, 5e9, 1e15])
@pytest.mark.parametrize("rows", [1, 16])
def test_the_largest_weight_is_one(rows, size, sign, dtype, cuda_kernels):
    """Also of scores beside which every difference that matters is below their rounding. Equal ones
    are of one block: lse, by which blocks merge, has such a rounding too."""
    for keys, num_workers in ((1, 1), (300, 1), (4, 2)):
        q = torch.zeros(1, rows, 1, 64, dtype=dtype, device=cuda_kernels)
        k = torch.zeros(1, 1, keys, 64, dtype=dtype, device=cuda_kernels)
        v = torch.randn(1, 1, keys, 64, device=cuda_kernels).to(dtype)
        q[..., 0], k[..., 0] = sign, 1
        k[:, :, 3:200, 0] = 1 - sign / 4  # no weight at all
        options = {"softmax_scale": size, "num_workers": num_workers}
        o, lse = lean_decode(q, k, v, **options, out_dtype=torch.float32)
        # lse does not hold what the reference subtracts it for.
        scores = size * (q.double() @ k.double().mT)
        rtol = 1e-6 if dtype == torch.float32 else torch.finfo(dtype).eps  # of a weight
        expected = torch.softmax(scores, -1) @ v.double()
        torch.testing.assert_close(o.double(), expected, rtol=rtol, atol=rtol / 8)
        torch.testing.assert_close(lse.double(), scores.logsumexp(-1), rtol=3e-7, atol=0)


@pytest.mark.deep
@pytest.mark.parametrize("rows", [1, 16, 64])
def test_many_small_weights_beside_a_large_one(rows, cuda_kernels):
    """131,072 equal ones in one block: a sum in float32 would lose 2e-5 of them."""
    keys = (128 << 10) + 1
    q = torch.zeros(1, rows, 1, 8, dtype=BF16, device=cuda_kernels)
    k, v = (torch.ones(1, 1, keys, 8, dtype=BF16, device=cuda_kernels) for _ in range(2))
    q[..., 0], k[:, :, 0, 0] = 1, 3.65625
    o, lse = lean_decode(q, k, v, softmax_scale=1.0, num_workers=1)
    expected = math.log(math.exp(3.65625) + (keys - 1) * math.e)
    assert (o == 1).all() and (lse.double() - expected).abs().max() < 2e-6


@by_dtype
def test_equal_scores_give_the_mean(dtype, cuda):
    """A million equal weights: sums in float32 must not lose the small against the large."""
    need_memory(12 << 30)
    keys = sized(1 << 20)
    q, k, v = random_inputs(cuda, dtype, keys)
    k[:] = k[:, :, :1]
    v += 0.5
    check(q, k, v)
    _, lse = lean_decode(q, k, v)
    scores = (q.double() @ k[:, :, :1].double().repeat_interleave(4, 1).mT).squeeze(-1) * 128**-0.5
    assert (lse - scores - math.log(keys)).abs().max() < 2e-5


def test_alibi_at_positions_in_the_millions(cuda):
    q, k, v = random_inputs(cuda, BF16, sized(200_000))
    left_out = (
        200_000 - sized(200_000)
    ) // 64  # blocks before the first: the last ends near 39.8 M
    options = {
        "alibi_slopes": 2.0 ** -torch.arange(1.0, 9.0, device=cuda),
        "query_positions": torch.full((1, 1), 40_000_000, device=cuda),
        "key_layout": ((3 + 199 * left_out) * 64, 64, 199 * 64),
    }
    check(q, k, v, **options)


KEYS_PAST_2_31 = sized((1 << 31) // 1024) + 5000  # of 8 heads of 128
PAST = sized(1 << 31)


@pytest.fixture
def huge(cuda):
    """K and V of more than 2^31 elements each, in memory that is NaN until written to."""
    need_memory(2 * 2 * 1024 * KEYS_PAST_2_31 + (9 << 30))
    shape = 1, 8, KEYS_PAST_2_31, 128
    k, v = (torch.full(shape, NAN, dtype=BF16, device=cuda) for _ in range(2))
    assert k.numel() > PAST
    yield k, v
    del k, v
    torch.cuda.empty_cache()


@pytest.mark.parametrize("layout", ["heads first", "tokens first"])
def test_elements_past_2_31(layout, huge, cuda):
    k, v = huge
    if layout == "tokens first":
        k, v = (x.view(1, KEYS_PAST_2_31, 8, 128).transpose(1, 2) for x in (k, v))
    q = torch.randn(1, 16, 1, 128, device=cuda).to(BF16)
    begin, end = KEYS_PAST_2_31 - 3000, KEYS_PAST_2_31
    for x in (k, v):
        x[:, :, begin:end] = torch.randn(1, 8, end - begin, 128, device=cuda).to(BF16)
    last_element = 7 * k.stride(1) + (end - 1) * k.stride(2)
    assert last_element + 128 > PAST
    ranges = torch.tensor([[[begin, end]]], dtype=torch.int32, device=cuda)
    check(q, k, v, ranges)


def test_all_of_two_million_keys(huge, cuda):
    k, v = huge
    k.normal_(), v.normal_()
    check(torch.randn(1, 16, 1, 128, device=cuda).to(BF16), k, v)


def test_pages_past_2_31_elements(huge, cuda):
    page_size, num_pages = 64, KEYS_PAST_2_31 * 8 // 64
    k, v = (x.view(-1)[: num_pages * 64 * 128].view(num_pages, 1, 64, 128) for x in huge)
    table = torch.randint(num_pages // 2, num_pages, (2, 40), device=cuda).int()
    table[0, 0], table[1, 20] = num_pages - 1, 0
    for page in table.flatten().tolist():
        for x in (k, v):
            x[page] = torch.randn(1, 64, 128, device=cuda).to(BF16)
    q = torch.randn(2, 4, 1, 128, device=cuda).to(BF16)
    ranges = torch.tensor([[[0, 40 * page_size]], [[77, 2001]]], dtype=torch.int32, device=cuda)
    table[1, 2001 // page_size + 1 :] = 2**31 - 1
    assert (table.max() == 2**31 - 1) and k.stride(0) * (num_pages - 1) > PAST
    check(q, k, v, ranges, page_table=table)
