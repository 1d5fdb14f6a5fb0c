# SPDX-License-Identifier: BSD-3-Clause
"""The CPU's lean_decode with AMX on a processor that has AVX-512 with BF16 and no tiles."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

import emulated
import emulator_build
from compilation import Compiler

KERNELS = Compiler(
    emulator_build.BUILD.with_name("amx_emulator"),
    [*emulator_build.FLAGS, "-include", "tests/amx_emulator/amx.h"],
)
# amx_kernels, and those that it leaves other dtypes to.
SOURCES = [Path("csrc/cpu/amx/decode_amx.cpp"), Path("csrc/cpu/vector/decode_avx512.cpp")]
BRIDGE = [
    Path("tests/amx_emulator/extension.cpp"),
    *(
        Path("csrc/args") / f"{name}.cpp"
        for name in ("decode", "memory_overlap", "merge", "ranges")
    ),
    *(Path("csrc/cpu") / f"{name}.cpp" for name in ("decode", "merge", "merge_rows", "ranges")),
]


@contextmanager
def emulated_amx() -> Iterator[None]:
    """Within it lean_decode on CPU tensors is that of AMX."""
    load()
    torch.ops.tree_attention_amx_emulator.install()
    try:
        yield
    finally:
        torch.ops.tree_attention_amx_emulator.uninstall()


@functools.cache
def load() -> None:
    objects = KERNELS.compile(SOURCES) + emulated.COMPILER.compile(BRIDGE)
    torch.ops.load_library(KERNELS.link("amx.so", objects, ["-shared", *emulated.LIBRARIES]))
