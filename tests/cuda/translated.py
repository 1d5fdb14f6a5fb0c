# SPDX-License-Identifier: BSD-3-Clause
"""Builds the emulator's program with kernels as nvcc's PTX has them (ptx_translator.py)."""

import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

import emulator_build
from compilation import ROOT, Compiler
from ptx_translator import translate
from sass import find_tool

# As setup.py has them, without -lineinfo, which only adds lines.
NVCC_FLAGS = ["-std=c++20", "-fmad=false", "-O3"]
# Signed integers of PTX wrap. More than -O0 takes longer than it saves.
FLAGS = [
    *(re.sub("^-I", f"-I{ROOT}/", flag) for flag in emulator_build.FLAGS),
    *("-O0", "-g0", "-fwrapv", "-w"),
]
HEADER = Path("tests/cuda_emulator/ptx_instructions.h")
ELEMENTS = {
    **{"bf16": "BFloat16", "fp16": "Float16", "fp32": "float"},
    **{"int8": "Int8", "float8": "Float8"},
}


def instantiation(dtypes: str, columns: int, rows: int) -> str:
    """The source of one decode kernel alone, which takes nvcc a part of the time of its file."""
    element, *cached = (ELEMENTS[dtype] for dtype in dtypes.split("_"))
    config = f"TileConfig<{element}, {columns}, {rows}, {(cached or [element])[0]}>"
    return (
        '#include "cuda/decode/lean_decode.cuh"\nnamespace tree_attention::cuda {\n'
        f"template __global__ void lean_decode_kernel<{element}, {config}>("
        "const __grid_constant__ LaunchParams);\n}\n"
    )


def ptx_of(source: Path, folder: Path, csrc: Path = ROOT / "csrc", architecture: str = "90") -> str:
    """What nvcc makes of `source`; skips the test without nvcc."""
    ptx = folder / f"{source.stem}.ptx"
    flags = [*NVCC_FLAGS, "-ptx", f"-arch=compute_{architecture}", f"-I{csrc}", "-Itests/cpp"]
    command = [find_tool("nvcc"), *flags, source, "-o", ptx]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return ptx.read_text()


def build(ptx: str, name: str, folder: Path, sources: Sequence[Path] = ()) -> Path:
    """The program of tests in which the PTX takes the place of its kernels' source; `sources` are
    what that program needs beside the emulator and the tests."""
    source = folder / f"{name}.cpp"
    source.write_text(translate(ptx, f"{name}.ptx"))
    compiler = Compiler(folder, FLAGS, folder, HEADER)
    rest = [*emulator_build.EMULATOR, *emulator_build.TESTS, *sources]
    objects = [*compiler.compile([Path(source.name)]), *emulator_build.COMPILER.compile(rest)]
    return compiler.link(name, objects, emulator_build.PARTIAL_LINK_FLAGS)


def run(program: Path, *cases: str, seconds: float = 60) -> str:
    """The error that the program reports, or nothing."""
    try:
        result = subprocess.run([program, *cases], capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return "it does not end"
    if result.returncode < 0:
        return f"signal {-result.returncode}"
    return result.stderr if result.returncode != 0 else ""
