# SPDX-License-Identifier: BSD-3-Clause
"""What the compiled kernels need of a multiprocessor, read from the extension: no GPU is asked."""

import itertools
import re
import subprocess
from dataclasses import dataclass, replace

import pytest
import torch

import emulated
from sass import CONFIG, extension_with_cuda, find_tool

LIMITS = {"sm_80": emulated.A100, "sm_90": emulated.H100}
REGISTERS = 65536  # of a multiprocessor, dealt in units of 256 to a warp
SYSTEM_SHARED_BYTES = 1024  # of each block; cuobjdump counts them on sm_90
ELEMENTS = {"BFloat16": torch.bfloat16, "Float16": torch.float16, "f": torch.float32}
OF_8_BITS = {"Int8": torch.int8, "Float8": torch.float8_e4m3fn}


@dataclass(frozen=True)
class Kernel:
    architecture: str
    dtype: torch.dtype
    kv_dtype: torch.dtype
    head_dim: int
    row_tile: int
    registers: int
    stack: int
    local: int
    static_shared: int

    @property
    def name(self) -> str:
        dtypes = f"{self.dtype} {self.kv_dtype}"
        return f"{self.architecture} {dtypes} d{self.head_dim} rows {self.row_tile}"


@pytest.fixture(scope="module")
def kernels() -> list[Kernel]:
    text = subprocess.run(
        [find_tool("cuobjdump"), "--dump-resource-usage", extension_with_cuda()],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    return parse(text)


def parse(text: str) -> list[Kernel]:
    kernels, architecture, shape = [], "", None
    for line in text.splitlines():
        if match := re.search(r"arch = (sm_\d+)", line):
            architecture = match[1]
        if match := re.search(r"Function \S*lean_decode_kernelI(\S*):", line):
            config = CONFIG.match(match[1])
            assert config is not None, line
            head_dim, row_tile = int(config["head_dim"]), int(config["row_tile"])
            dtype = ELEMENTS[config["element"] or "f"]
            shape = architecture, dtype, OF_8_BITS.get(config["cached"], dtype), head_dim, row_tile
        elif match := re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", line):
            registers, stack, static_shared, local = map(int, match.groups())
            if shape is not None:
                kernels.append(Kernel(*shape, registers, stack, local, static_shared))
            shape = None
        elif "Function" in line:
            shape = None
    return kernels


def occupancy(kernel: Kernel) -> emulated.Plan:
    limits = LIMITS[kernel.architecture]
    return emulated.plan(kernel.dtype, kernel.head_dim, kernel.row_tile, limits, kernel.kv_dtype)


def test_every_kernel_is_there(kernels):
    built = {(k.architecture, k.dtype, k.kv_dtype, k.head_dim, k.row_tile) for k in kernels}
    assert len(built) == len(kernels)
    dtypes = [(dtype, dtype) for dtype in ELEMENTS.values()]
    dtypes += [(torch.bfloat16, kv_dtype) for kv_dtype in OF_8_BITS.values()]
    dtypes += [(torch.float16, kv_dtype) for kv_dtype in OF_8_BITS.values()]
    expected = {
        (architecture, dtype, kv_dtype, head_dim, row_tile)
        for architecture in {k.architecture for k in kernels}
        for dtype, kv_dtype in dtypes
        for head_dim in (64, 128, 256)
        for row_tile in (8, 16, 32, 64, 128)
        if occupancy(Kernel(architecture, dtype, kv_dtype, head_dim, row_tile, 0, 0, 0, 0)).row_tile
        == row_tile
    }
    expected |= {
        (architecture, dtype, dtype, 576, row_tile)
        for architecture in {k.architecture for k in kernels}
        for dtype in (torch.bfloat16, torch.float16)
        for row_tile in (16, 64)
    }
    assert built == expected and len(expected) % (31 + 36 + 4) == 0


def test_kernels_keep_everything_in_registers(kernels):
    """A spill, or an array indexed at run time, would be traffic to local memory in the loop."""
    assert [k.name for k in kernels if k.stack or k.local] == []


def test_registers_and_shared_memory_allow_the_planned_blocks(kernels):
    for kernel in kernels:
        if kernel.architecture not in LIMITS:
            continue
        plan = occupancy(kernel)
        limits = LIMITS[kernel.architecture]
        assert kernel.static_shared in (0, SYSTEM_SHARED_BYTES), kernel.name
        assert plan.shared_bytes <= limits.shared_bytes_per_block, kernel.name
        shared = plan.blocks_per_sm * (plan.shared_bytes + SYSTEM_SHARED_BYTES)
        assert shared <= limits.shared_bytes_per_sm, kernel.name
        warp_registers = -(-kernel.registers * 32 // 256) * 256
        registers = plan.blocks_per_sm * plan.num_threads // 32 * warp_registers
        assert registers <= REGISTERS, kernel.name


def test_two_blocks_share_a_multiprocessor():
    """With one query of a model they have 96 KB of keys and values in flight on a Hopper."""
    shapes = itertools.product((64, 128), (None, *OF_8_BITS.values()))
    for head_dim, kv_dtype in [*shapes, (256, None)]:
        plan = emulated.plan(torch.bfloat16, head_dim, 8, emulated.H100, kv_dtype)
        assert (plan.row_tile, plan.num_threads, plan.blocks_per_sm) == (8, 128, 2)
        assert plan.num_stages >= 3
        assert plan.blocks_per_sm * plan.num_stages * 32 * 1024 >= 96 * 1024
        plan = emulated.plan(torch.bfloat16, head_dim, 8, emulated.A100, kv_dtype)
        assert plan.blocks_per_sm == 2 and plan.num_stages >= 2


def test_blocks_that_find_no_room_are_seen():
    """What test_cuda_smoke.py asks the driver, of a device that claims more memory for a block than
    a multiprocessor has."""
    q, k = torch.zeros(1, 8, 1, 128).bfloat16(), torch.zeros(1, 1, 1, 128).bfloat16()
    rooms = {emulated.H100.shared_bytes_per_sm: (2, 2), 100 << 10: (1, 0)}
    for shared_bytes_per_sm, expected in rooms.items():
        limits = replace(emulated.H100, shared_bytes_per_sm=shared_bytes_per_sm)
        with emulated.emulated_operators(0, limits):
            assert torch.ops.tree_attention.lean_decode_plan(q, k, k)[:2] == expected
