# SPDX-License-Identifier: BSD-3-Clause
# mypy: disable-error-code="no-untyped-def"
"""A kernel that only reads: the ceiling of everything that has to read the same bytes."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

# Elements of a block, warps, programs per multiprocessor: what is fastest depends on the size.
CONFIGURATIONS = ((1024, 4, 16), (2048, 4, 16), (4096, 8, 8), (8192, 8, 8))


@triton.jit
def read_kernel(data, sums, num_elements, num_rounds, BLOCK: tl.constexpr):
    """Each program sums every num_programs-th block of int32 elements, 16 bytes per load."""
    program = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], dtype=tl.int32)
    for i in range(num_rounds):
        begin = (program + i * tl.num_programs(0).to(tl.int64)) * BLOCK
        left = num_elements - begin
        total += tl.load(
            data + begin + offsets, mask=offsets < left, other=0, eviction_policy="evict_first"
        )
    tl.store(sums + program, tl.sum(total))


def sums(data: Tensor, configuration: tuple[int, int, int]) -> Tensor:
    """Partial sums of int32 elements; computing them reads all of `data` once."""
    block, warps, programs_per_multiprocessor = configuration
    blocks = -(-data.numel() // block)
    multiprocessors = torch.cuda.get_device_properties(data.device).multi_processor_count
    programs = min(blocks, multiprocessors * programs_per_multiprocessor)
    out = torch.empty(programs, dtype=torch.int32, device=data.device)
    rounds = -(-blocks // programs)
    read_kernel[(programs,)](data, out, data.numel(), rounds, BLOCK=block, num_warps=warps)
    return out


def candidates(
    sets: Sequence[Tensor], configurations: Sequence[tuple[int, int, int]] = CONFIGURATIONS
) -> dict[tuple[int, int, int], Callable[[int], Tensor]]:
    """For each configuration a call that reads the i-th of `sets` of bytes."""
    data = [x.view(torch.int32) for x in sets]

    def call(configuration: tuple[int, int, int], i: int) -> Tensor:
        return sums(data[i], configuration)

    return {configuration: partial(call, configuration) for configuration in configurations}
