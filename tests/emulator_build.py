# SPDX-License-Identifier: BSD-3-Clause
"""Compiles the kernels for the emulated CUDA device, and the program that tests both."""

import runpy
from dataclasses import replace
from pathlib import Path

from compilation import ROOT, Compiler

BUILD = ROOT / "build" / "cuda_emulator"
FLAGS = [
    *("-std=c++20", "-O2", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off"),
    *("-Wall", "-Wextra", "-Wno-unknown-pragmas"),
    *("-Itests/cuda_emulator", "-Itests/cpp", "-Icsrc", "-I.", "-DTREE_ATTENTION_WGMMA"),
]
COMPILER = Compiler(BUILD, FLAGS, header=Path("tests/cuda_emulator/standard_library.h"))
THREAD_COMPILER = replace(
    COMPILER,
    build=ROOT / "build" / "cuda_emulator_thread",
    flags=[*FLAGS, "-O1", "-fsanitize=thread"],
)
# For programs with a part of the kernels only.
PARTIAL_LINK_FLAGS = ["-no-pie", "-Wl,--unresolved-symbols=ignore-in-object-files"]

EMULATOR = [
    Path("tests/cuda_emulator") / name
    for name in ("fiber.cpp", "hopper.cpp", "machine.cpp", "products.cpp", "ptx_host.cpp")
]
TESTS = [
    Path("tests/cpp/decode_case.cpp"),
    Path("csrc/cuda/decode/workspaces.cpp"),
    Path("tests/cuda_emulator/main.cpp"),
    Path("benchmarks/cuda/ablations/ablations.cu"),
    Path("benchmarks/cuda/ablations/stamped.cu"),
    *sorted(path.relative_to(ROOT) for path in (ROOT / "tests/cuda_emulator").glob("test_*.cpp")),
]
LAUNCHES = sorted(path.relative_to(ROOT) for path in (ROOT / "csrc/cuda").rglob("*.cu"))
# The decode kernels, which the build writes.
INSTANCES_FOLDER = Path("build/instances")
_decode = runpy.run_path(str(ROOT / "csrc/cuda/decode/instances.py"))


def _written(texts: dict[str, str]) -> list[Path]:
    paths = _decode["write_instances"](ROOT / INSTANCES_FOLDER, texts)
    return [path.relative_to(ROOT) for path in paths]


INSTANCES = _written(_decode["instances"]())
WGMMA_INSTANCES = _written(_decode["wgmma_instances"]())


def program() -> Path:
    sources = [*EMULATOR, *TESTS, *LAUNCHES, *INSTANCES, *WGMMA_INSTANCES]
    return COMPILER.link("tests", COMPILER.compile(sources))
