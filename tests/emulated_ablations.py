# SPDX-License-Identifier: BSD-3-Clause
"""The ablations' operators of benchmarks/cuda, from their sources, on the emulated device."""

from pathlib import Path

import emulated
import emulator_build
from benchmarks.cuda import ablations
from compilation import ROOT

# What `ablations.build` compiles, but for what needs a driver.
_ALL = [
    *(ablations.FOLDER.relative_to(ROOT) / name for name in ablations.SOURCES if name != "ops.cpp"),
    *map(Path, ablations.PRODUCT_SOURCES),
]
KERNELS = [*emulator_build.EMULATOR, *(path for path in _ALL if path.suffix == ".cu")]
BRIDGE = [
    *(path for path in _ALL if path.suffix == ".cpp" and path.name != "workspaces.cpp"),
    Path("tests/cuda_emulator/ablations_extension.cpp"),
]


def library() -> Path:
    objects = emulator_build.COMPILER.compile(KERNELS) + emulated.COMPILER.compile(BRIDGE)
    return emulated.COMPILER.link("ablations.so", objects, ["-shared", *emulated.LIBRARIES])
