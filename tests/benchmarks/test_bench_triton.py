# SPDX-License-Identifier: BSD-3-Clause
"""The Triton kernels of the benchmark without a GPU: interpreted, and compiled for sm_90."""

import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tree_attention.reference.accuracy import check_against_float64

triton = pytest.importorskip("triton")
ASTSource = pytest.importorskip("triton.compiler").ASTSource
GPUTarget = pytest.importorskip("triton.backends.compiler").GPUTarget
read_probe = pytest.importorskip("benchmarks.cuda.read_probe")
fd = pytest.importorskip("benchmarks.cuda.triton_flash_decoding")

# Strides and pointers are multiples of 16 elements or bytes in every case of the benchmark.
ALIGNED = {"q", "k", "v", "key_ranges", "page_table", "o_parts", "lse_parts", "o", "lse", "data"}
ALIGNED |= {"num_elements"}
ALIGNED |= {f"{x}_{axis}" for x in "qkv" for axis in ("batch", "head", "token", "slot")}


def compile_for_h100(kernel: Any, types: dict[str, str], warps: int, **constants: Any) -> str:
    """PTX. ptxas has assembled it as well."""
    signature = {
        n: "constexpr" if n in constants else types.get(n, "i32") for n in kernel.arg_names
    }
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(kernel.arg_names)
        if name in ALIGNED and name not in constants
    }
    source = ASTSource(kernel, signature=signature, constexprs=constants, attrs=aligned)
    options = {"num_warps": warps, "num_stages": 3}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert compiled.asm["cubin"]
    ptx: str = compiled.asm["ptx"]
    return ptx


@pytest.mark.parametrize(("head_dim", "page_size"), [(128, 0), (64, 16)])
def test_part_kernel_compiles(head_dim: int, page_size: int) -> None:
    types = dict.fromkeys("qkv", "*bf16") | {"key_ranges": "*i32", "page_table": "*i32"}
    types |= {"o_parts": "*fp32", "lse_parts": "*fp32", "scale_log2": "fp32"}
    constants = {"GROUP": 4, "HEAD_DIM": head_dim, "ROWS": 16, "BLOCK": fd.BLOCK_KEYS}
    constants |= {"PAGE_SIZE": page_size, "PRECISION": "tf32"}
    if not page_size:
        constants["page_table"] = None
    ptx = compile_for_h100(fd.part_kernel, types, 4, **constants)
    assert "mma.sync" in ptx, "tensor cores"
    # Keys and values come 16 bytes per thread, ahead of their use. The ids of pages come alone.
    sizes = [
        int(n, 0) for n in re.findall(r"cp\.async\.c[ag]\.shared\.global [^;]*?, (0x\w+|\d+)", ptx)
    ]
    assert 16 in sizes
    assert set(sizes) <= ({4, 16} if page_size else {16})


def test_merge_kernel_compiles() -> None:
    types = {"o_parts": "*fp32", "lse_parts": "*fp32", "o": "*bf16", "lse": "*fp32"}
    assert compile_for_h100(fd.merge_kernel, types, 4, HEAD_DIM=128, PARTS=64)


@pytest.mark.parametrize("configuration", read_probe.CONFIGURATIONS)
def test_read_probe_reads_16_bytes_at_once(configuration: tuple[int, int, int]) -> None:
    block, warps, _ = configuration
    types = {"data": "*i32", "sums": "*i32", "num_elements": "i64"}
    ptx = compile_for_h100(read_probe.read_kernel, types, warps, BLOCK=block)
    loads = re.findall(r"ld\.global\S*", ptx)
    assert len(loads) == block // (32 * warps) // 4
    assert all((".v4" in load and "evict_first" in load.lower()) or ".v4" in load for load in loads)


def test_number_of_parts() -> None:
    assert fd.num_parts(8, 16, 132) == 16  # as many as there are blocks
    assert fd.num_parts(512, 1024, 132) == 1  # enough outputs for all multiprocessors
    # 32 parts keep 97 % of two programs per multiprocessor busy; 31 are the fewest with 95 % of it.
    assert fd.num_parts(8, 1024, 132) == 31
    assert 132 < fd.num_parts(1, 10_000, 132) <= fd.MAX_PARTS
    assert fd.num_parts(3, 1, 132) == fd.num_parts(3, 0, 132) == 1
    for outputs in range(1, 300, 7):
        for blocks in (1, 5, 64, 1000):
            n = fd.num_parts(outputs, blocks, 132)
            assert 1 <= n <= max(1, blocks)
            if n > 1:  # no part without keys but by rounding
                assert math.ceil(blocks / n) < math.ceil(blocks / (n - 1))


INTERPRETED = Path(__file__).with_name("triton_interpreted.py")


def test_interpreted_kernels_are_right() -> None:
    """In a process of its own: Triton decides when it is loaded."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, str(INTERPRETED)], env=environment, capture_output=True, text=True
    )
    if "only 0-dimensional arrays can be converted" in done.stderr:
        pytest.skip(f"the interpreter of triton {triton.__version__} does not know this numpy")
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["right"] * 6


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_kernels_on_the_device() -> None:
    q = torch.randn(2, 8, 2, 128, device="cuda", dtype=torch.bfloat16)
    k, v = torch.randn(2, 2, 2, 1000, 128, device="cuda", dtype=torch.bfloat16).unbind()
    ends = torch.tensor([[999, 1000], [76, 77]], device="cuda", dtype=torch.int32)
    ranges = torch.stack([torch.zeros_like(ends), ends], -1)
    result = fd.flash_decoding(q, k, v, ranges, multiprocessors=132)
    assert check_against_float64(q, k, v, ranges, *result).right
    data = torch.randint(-(1 << 20), 1 << 20, ((1 << 20) + 4,), device="cuda", dtype=torch.int32)
    for configuration in read_probe.CONFIGURATIONS:
        assert read_probe.sums(data, configuration).sum() == data.sum()
