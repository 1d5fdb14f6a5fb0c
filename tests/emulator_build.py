# SPDX-License-Identifier: BSD-3-Clause
"""Compiles the kernels for the emulated CUDA device, and the program that tests both."""

from pathlib import Path

from compilation import ROOT, Compiler

BUILD = ROOT / "build" / "cuda_emulator"
FLAGS = [
    *("-std=c++20", "-O2", "-g1", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off"),
    *("-Wall", "-Wextra", "-Wno-unknown-pragmas"),
    *("-Itests/cuda_emulator", "-Itests/cpp", "-Icsrc"),
]
COMPILER = Compiler(BUILD, FLAGS)

EMULATOR = [
    Path("tests/cuda_emulator") / name for name in ("fiber.cpp", "machine.cpp", "ptx_host.cpp")
]
TESTS = [
    Path("tests/cpp/decode_case.cpp"),
    Path("tests/cuda_emulator/main.cpp"),
    *sorted(path.relative_to(ROOT) for path in (ROOT / "tests/cuda_emulator").glob("test_*.cpp")),
]
LAUNCHES = [
    Path("csrc/cuda") / name
    for name in ("ablations.cu", "check_pages.cu", "launch.cu", "merge_states.cu", "one_shot.cu")
]
INSTANCES = sorted(
    path.relative_to(ROOT) for path in (ROOT / "csrc/cuda/instantiations").glob("lean_decode_*.cu")
)


def program() -> Path:
    return COMPILER.link("tests", COMPILER.compile([*EMULATOR, *TESTS, *LAUNCHES, *INSTANCES]))
