# SPDX-License-Identifier: BSD-3-Clause
"""A small problem for every kernel and every path through it: first on a new GPU, and under
compute-sanitizer. Nothing runs on the device but our kernels and copies."""

import pytest
import torch

from helpers import assert_same_bits, make_problem
from latent_problems import make_latents
from tree_attention import append_kv, merge_states, reference
from tree_attention.exchange.transport import symmetric_memory

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

KERNELS = {
    f"{str(dtype)[6:]} d{head_dim}": {"dtype": dtype, "head_dim": head_dim}
    for dtype in (BF16, FP16, FP32)
    for head_dim in (64, 128, 256)
}


KERNELS |= {
    f"{str(dtype)[6:]} {str(kv_dtype)[6:]} d{head_dim}": {
        "dtype": dtype, "kv_dtype": kv_dtype, "head_dim": head_dim
    }
    for dtype in (BF16, FP16)
    for kv_dtype in (torch.int8, torch.float8_e4m3fn)
    for head_dim in (64, 128, 256)
}  # fmt: skip


KERNELS |= {
    f"{str(dtype)[6:]} latents of {rows}": {"dtype": dtype, "group_size": rows, "head_dim": 576}
    for dtype in (BF16, FP16)
    for rows in (16, 40)
}


@pytest.mark.parametrize("kernel", KERNELS)
def test_kernel(kernel, cuda_kernels):
    make = make_latents if "latents" in kernel else make_problem
    problem = make(batch=2, seqlen_k=400, ranges="ragged", layout="padded", **KERNELS[kernel])
    problem.to(cuda_kernels).run_and_check(num_workers=5)


@pytest.mark.parametrize("rows", [8, 16, 20, 40, 70, 130])
@pytest.mark.parametrize(
    "dtype, kv_dtype", [(BF16, None), (FP32, None), (BF16, torch.int8)],
    ids=["bf16", "fp32", "bf16 int8"],
)  # fmt: skip
def test_row_tile(dtype, kv_dtype, rows, cuda_kernels):
    problem = make_problem(
        batch=1, num_heads_kv=1, group_size=1, seqlen_q=rows, seqlen_k=300, ranges="causal",
        dtype=dtype, kv_dtype=kv_dtype,
    )  # fmt: skip
    problem.to(cuda_kernels).run_and_check(num_workers=3)


@pytest.mark.timeout(110)  # gpu_smoke.py
def test_resident_blocks(cuda_kernels):
    """The plan counts on no more blocks on a multiprocessor than the driver has room for, with the
    registers of each kernel and the shared memory that the system takes of each block."""
    wrong = {}
    for name, kernel in KERNELS.items():
        kv_dtype = kernel.get("kv_dtype", kernel["dtype"])
        for rows in (8, 16, 32, 64, 128):
            q = torch.zeros(1, rows, 1, kernel["head_dim"], dtype=kernel["dtype"])
            k = torch.zeros(1, 1, 1, kernel["head_dim"]).to(kv_dtype)
            tensors = [x.to(cuda_kernels) for x in (q, k, k)]
            planned, resident, _ = torch.ops.tree_attention.lean_decode_plan(*tensors)
            if not 1 <= planned <= resident:
                wrong[f"{name}, {rows} rows"] = planned, resident
    assert wrong == {}


PATHS = {
    "one worker": (1, {}),
    "flat fix-up": (10, {"batch": 1, "num_heads_kv": 1, "seqlen_k": 2000}),
    "fix-up as a tree": (45, {"batch": 1, "num_heads_kv": 1, "seqlen_k": 4000}),
    "fix-up of three levels": (
        800,
        {"batch": 1, "num_heads_kv": 1, "group_size": 1, "seqlen_k": 25_600, "head_dim": 256},
    ),
    "a block for each multiprocessor": (0, {"seqlen_k": 1000}),
    "workers without work": (300, {}),
    "ring across outputs": (2, {"batch": 12, "ranges": "random", "seqlen_k": 260}),
    "pages": (5, {"page_size": 7, "ranges": "random"}),
    "pages of each head": (5, {"page_size": 16, "ranges": "ragged", "per_head": True}),
    "score terms": (4, {"alibi": 0.1, "softcap": 5.0, "softmax_scale": 0.2, "seqlen_q": 3}),
    "no keys": (3, {"seqlen_k": 0}),
}


@pytest.mark.parametrize(
    "dtype, kv_dtype", [(BF16, None), (FP32, None), (BF16, torch.int8)],
    ids=["bf16", "fp32", "bf16 int8"],
)  # fmt: skip
@pytest.mark.parametrize("path", PATHS)
def test_path(path, dtype, kv_dtype, cuda_kernels):
    num_workers, problem = PATHS[path]
    problem = make_problem(dtype=dtype, kv_dtype=kv_dtype, **problem).to(cuda_kernels)
    first = problem.run_and_check(num_workers=num_workers)
    again = problem.run(num_workers=num_workers)
    assert_same_bits([x.cpu() for x in first], [x.cpu() for x in again])


@pytest.mark.parametrize("path", ["pages", "score terms", "ring across outputs"])
def test_path_of_latents(path, cuda_kernels):
    num_workers, problem = PATHS[path]
    for group_size in (4, 20):
        latents = make_latents(**problem | {"group_size": group_size}).to(cuda_kernels)
        latents.run_and_check(num_workers=num_workers)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("n", [1, 5, 33])
def test_merge(n, dtype, cuda):
    o_parts, lse_parts = torch.randn(n, 3, 7, 20).to(dtype), torch.randn(n, 3, 7)
    lse_parts[0, 0] = -torch.inf
    o, lse = merge_states(o_parts.to(cuda), lse_parts.to(cuda), out_dtype=FP32)
    expected = merge_states(o_parts, lse_parts, out_dtype=FP32)
    torch.testing.assert_close((o.cpu(), lse.cpu()), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("page_size", [0, 4], ids=["rows", "pages"])
@pytest.mark.parametrize("kv_dtype", [BF16, FP32, torch.int8, torch.float8_e4m3fn])
def test_append(kv_dtype, page_size, cuda_kernels):
    """More is in test_append_kv.py."""
    k, v = torch.randn(2, 2, 3, 5, 72).to(BF16)
    outer, capacity = (4, page_size) if page_size else (2, 8)
    caches = torch.zeros(2, outer, 3, capacity, 72).to(kv_dtype)
    slots = torch.tensor([[3, -1, 0, 6, 2**40], [7, 5, -9, 1, 4]])
    if page_size:
        slots[1] += 8
    scales = torch.zeros(2, outer, 3, capacity)
    tensors = [x.to(cuda_kernels) for x in (k, v, *caches, slots, *scales)]
    scale = {"k_scale": tensors[5], "v_scale": tensors[6]} if kv_dtype.itemsize == 1 else {}
    append_kv(*tensors[:5], **scale, paged=bool(page_size))
    for x, cache, name in ((k, tensors[2], "k_scale"), (v, tensors[3], "v_scale")):
        for b, i in ((0, 0), (0, 2), (0, 3), (1, 0), (1, 1), (1, 3), (1, 4)):
            outer, inner = divmod(int(slots[b, i]), page_size) if page_size else (b, slots[b, i])
            kept, row = cache.cpu()[outer, :, inner], x[b, :, i]
            if scale:
                row, of_row = reference.quantise(row, kv_dtype)
                assert torch.equal(scale[name].cpu()[outer, :, inner], of_row)
            assert torch.equal(kept.float(), row.to(kv_dtype).float())


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])
def test_one_shot_of_one_rank(dtype, cuda_kernels):
    """Ranks that wait for each other are in test_one_shot.py: tools run one kernel at a time."""
    buffer = torch.zeros(
        symmetric_memory.buffer_bytes(1, 1 << 16), dtype=torch.uint8, device=cuda_kernels
    )
    memory = symmetric_memory.SymmetricMemory(0, [buffer.data_ptr()], cuda_kernels, 1 << 16)
    o, lse = torch.randn(2, 9, 1, 128, device=cuda_kernels), torch.randn(2, 9, 1).to(cuda_kernels)
    o = o.to(dtype)
    expected = merge_states(o[None], lse[None], out_dtype=FP32)
    for _ in range(3):
        out = torch.empty_like(o, dtype=FP32), torch.empty_like(lse)
        memory.run((o, lse), out, 10.0)
        assert_same_bits([x.cpu() for x in out], [x.cpu() for x in expected])
    memory.check()
