# SPDX-License-Identifier: BSD-3-Clause
"""The CPU kernels on AArch64: cross-compiled, and run by QEMU. It emulates each instruction to the
bit, but takes no time that means anything, so instructions are counted."""

import os
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest
from torch.utils.cpp_extension import include_paths

from compilation import ROOT, Compiler

CROSS_COMPILER, QEMU = "aarch64-linux-gnu-g++", "qemu-aarch64"
MISSING = [tool for tool in (CROSS_COMPILER, QEMU) if shutil.which(tool) is None]
pytestmark = [
    pytest.mark.deep,
    pytest.mark.skipif(bool(MISSING), reason=f"{' and '.join(MISSING)} not found"),
    pytest.mark.timeout(1800),
]

BUILD = ROOT / "build" / "arm"
COMPILER = Compiler(
    BUILD,
    [
        *("-std=c++20", "-O3", "-g1", "-ffp-contract=off", "-fno-wrapv", "-Wall", "-Wextra"),
        *("-Itests/cpp", "-Itests/cpp/shim", "-Icsrc", "-I.", "-isystem", include_paths()[0]),
    ],
    program=CROSS_COMPILER,
)
NAMES = ("neon_bf16", "neon", "portable")
# The newest CPU that QEMU knows, and one of the first of AArch64.
NEWEST, OLDEST = "max", "cortex-a57"
DTYPES = {"fp32": 0, "bf16": 1, "fp16": 2, "int8": 3, "float8": 4}  # of common/dtype.h


def sources(pattern: str) -> list[Path]:
    return sorted(path.relative_to(ROOT) for path in ROOT.glob(pattern))


KERNELS = [
    *sources("csrc/cpu/**/*.cpp"),
    *(Path("csrc/experts") / f"{name}.cpp" for name in ("multiply", "rows", "unpack")),
    *sources("csrc/experts/rows_*.cpp"),
]


@cache
def program(name: str, *patterns: str) -> Path:
    files = [*KERNELS, *(file for pattern in patterns for file in sources(pattern))]
    return COMPILER.link(name, COMPILER.compile(files), ["-static", "-pthread"])


def operator() -> Path:
    return program("operator", "tests/arm/test_operator.cpp", "tests/cpp/decode_case.cpp")


def run(command: Path, *arguments: str, cpu: str = NEWEST, options: tuple[str, ...] = ()):
    return subprocess.run(
        [QEMU, "-cpu", cpu, *options, str(command), *arguments], capture_output=True, text=True
    )


def test_cpp_suite():
    result = run(program("cpp", "tests/cpp/*.cpp"))
    assert result.returncode == 0, result.stdout + result.stderr
    assert " ".join(NAMES) in result.stdout


@pytest.mark.parametrize(
    ("cpu", "names"), [(NEWEST, NAMES), (OLDEST, NAMES[1:])], ids=["newest", "oldest"]
)
def test_instruction_sets_of_a_cpu(cpu, names):
    result = run(operator(), cpu=cpu)
    assert f"must be one of {', '.join(names)}, got none" in result.stdout


@pytest.mark.parametrize(
    ("cpu", "name"), [(NEWEST, "neon_bf16"), *((OLDEST, x) for x in NAMES[1:])]
)
def test_operator(cpu, name):
    """Every dtype, group, range, page, adjustment of scores and odd size, drawn at random. On the
    oldest CPU it must not meet an instruction that came later."""
    result = run(operator(), name, cpu=cpu)
    assert result.returncode == 0, result.stdout


@cache
def instructions_per_key(name: str, dtype: str, kv_dtype: str) -> float:
    """Count those of a decoding step, 32 query heads and 8 key/value heads of 128 dims."""
    plugin = COMPILER.build / "count_instructions.so"
    source = ROOT / "tests/arm/count_instructions.c"
    step = program("decode_step", "tests/arm/decode_step.cpp")
    compiler = [os.environ.get("CC", "gcc"), "-shared", "-fPIC", "-O2", str(source)]
    subprocess.run([*compiler, "-o", str(plugin)], check=True)
    counts, num_keys = [], 2048
    for calls in (1, 2):
        numbers = (DTYPES[dtype], DTYPES[kv_dtype], num_keys, calls)
        result = run(step, name, *map(str, numbers), options=("-plugin", str(plugin)))
        assert result.returncode == 0, result.stderr
        counts.append(int(result.stderr.split("instructions: ")[1].split()[0]))
    return (counts[1] - counts[0]) / (8 * num_keys)


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [("bf16", "bf16"), ("fp16", "fp16"), ("bf16", "int8"), ("bf16", "float8")],
)
def test_quarter_of_the_instructions(dtype, kv_dtype):
    ours, portable = (instructions_per_key(name, dtype, kv_dtype) for name in (NAMES[0], NAMES[2]))
    print(f"{kv_dtype}: {ours:.0f} of {portable:.0f}")
    assert ours <= portable / 4


@pytest.mark.parametrize("unit", sources("csrc/cpu/*/decode_neon*.cpp"), ids=lambda unit: unit.stem)
def test_unit_shares_no_function(unit):
    """The linker would keep one copy, whichever unit it comes from: see vector/simd.h."""
    (target,) = COMPILER.compile([unit])
    nm = CROSS_COMPILER.replace("g++", "nm")
    symbols = subprocess.run([nm, "-C", str(target)], capture_output=True, text=True, check=True)
    assert "_kernels" in symbols.stdout
    assert [line for line in symbols.stdout.splitlines() if " W " in line] == []
