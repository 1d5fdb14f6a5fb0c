# SPDX-License-Identifier: BSD-3-Clause
"""The kernel that only reads, without a GPU: interpreted, and compiled for sm_90."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")
ASTSource = pytest.importorskip("triton.compiler").ASTSource
GPUTarget = pytest.importorskip("triton.backends.compiler").GPUTarget
read_probe = pytest.importorskip("benchmarks.cuda.read_probe")

ALIGNED = {"data", "num_elements"}  # multiples of 16 elements or bytes in every case


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


@pytest.mark.parametrize("configuration", read_probe.CONFIGURATIONS)
def test_read_probe_reads_16_bytes_at_once(configuration: tuple[int, int, int]) -> None:
    block, warps, _ = configuration
    types = {"data": "*i32", "sums": "*i32", "num_elements": "i64"}
    ptx = compile_for_h100(read_probe.read_kernel, types, warps, BLOCK=block)
    loads = re.findall(r"ld\.global\S*", ptx)
    assert len(loads) == block // (32 * warps) // 4
    assert all((".v4" in load and "evict_first" in load.lower()) or ".v4" in load for load in loads)


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
    assert done.stdout.split() == ["right"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_kernels_on_the_device() -> None:
    data = torch.randint(-(1 << 20), 1 << 20, ((1 << 20) + 4,), device="cuda", dtype=torch.int32)
    for configuration in read_probe.CONFIGURATIONS:
        assert read_probe.sums(data, configuration).sum() == data.sum()
