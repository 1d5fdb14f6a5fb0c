# SPDX-License-Identifier: BSD-3-Clause
"""Run by test_bench_triton.py with TRITON_INTERPRET=1: prints `right`."""

import torch

from benchmarks.cuda import read_probe


def check_read_probe() -> None:
    data = torch.randint(-1000, 1000, (10_000,), dtype=torch.int32)
    sums = torch.empty(3, dtype=torch.int32)
    read_probe.read_kernel[(3,)](data, sums, data.numel(), 4, BLOCK=1024)
    print("right" if sums.sum() == data.sum() else "wrong")


check_read_probe()
