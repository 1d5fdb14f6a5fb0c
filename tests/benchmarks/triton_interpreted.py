# SPDX-License-Identifier: BSD-3-Clause
"""Run by test_bench_triton.py with TRITON_INTERPRET=1: prints `right` for each problem."""

import torch

from benchmarks.cuda import read_probe
from benchmarks.cuda.triton_flash_decoding import flash_decoding, num_parts
from tree_attention.reference.accuracy import check_against_float64


def check(dtype: torch.dtype, batch: int, heads: tuple[int, int], seqlen_q: int, window: int,
          page_size: int, multiprocessors: int) -> None:  # fmt: skip
    """Ragged, one sequence without keys; unseen slots are NaN. The interpreter has no bfloat16."""
    slots, dim = 208, 32
    q = torch.randn(batch, heads[0], seqlen_q, dim).to(dtype)
    k, v = torch.randn(2, batch, heads[1], slots, dim).to(dtype).unbind()
    ends = torch.tensor([slots, 67, 0][:batch])[:, None] - torch.arange(seqlen_q - 1, -1, -1)
    begins = (ends - window).clamp(min=0) if window else torch.zeros_like(ends)
    ranges = torch.stack([begins, ends], -1).int()
    table = None
    if page_size:
        pages = slots // page_size
        table = torch.randperm(batch * pages).int().view(batch, pages)
        pools = []
        for x in (k, v):
            pool = torch.empty(batch * pages, page_size, heads[1], dim, dtype=dtype)
            tokens = x.transpose(1, 2).unflatten(1, (pages, page_size)).flatten(0, 1)
            pool[table.flatten().long()] = tokens
            pools.append(pool.transpose(1, 2))
        k, v = pools
    o, lse = flash_decoding(q, k, v, ranges, table, multiprocessors=multiprocessors)
    accuracy = check_against_float64(q, k, v, ranges, o, lse, page_table=table)
    print("right" if accuracy.right else f"wrong: {accuracy}")


def check_read_probe() -> None:
    data = torch.randint(-1000, 1000, (10_000,), dtype=torch.int32)
    sums = torch.empty(3, dtype=torch.int32)
    read_probe.read_kernel[(3,)](data, sums, data.numel(), 4, BLOCK=1024)
    print("right" if sums.sum() == data.sum() else "wrong")


torch.manual_seed(0)
assert num_parts(2 * 2, 4, 8) > 1 and num_parts(1, 4, 1) == 2, "the merge is not tested"
check(torch.float32, 2, (4, 2), 1, 0, 0, 8)
check(torch.float16, 3, (8, 2), 5, 0, 0, 8)
check(torch.float16, 2, (2, 2), 1, 30, 0, 1)
check(torch.float32, 1, (5, 1), 16, 100, 0, 4)  # more rows than one program takes
check(torch.float32, 2, (4, 2), 2, 0, 16, 8)
check_read_probe()
