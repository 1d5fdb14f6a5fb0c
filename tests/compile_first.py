# SPDX-License-Identifier: BSD-3-Clause
"""Compiles the emulated device before the deep tests begin, on all cores, and says how far it is:
whichever test came first would do so within its own time, while others wait for it."""

import os
from pathlib import Path

import emulated
import emulated_ablations
import emulator_build
from compilation import Compiler

SOURCES: list[tuple[Compiler, list[Path]]] = [
    (
        emulator_build.COMPILER,
        [*emulated.KERNELS, *emulator_build.TESTS, *emulated_ablations.KERNELS],
    ),
    (
        emulator_build.THREAD_COMPILER,
        [*emulator_build.EMULATOR, *emulator_build.TESTS, *emulator_build.LAUNCHES],
    ),
    (emulated.COMPILER, [*emulated.BRIDGE, *emulated_ablations.BRIDGE]),
]


def main() -> None:
    batch = 8 * (os.cpu_count() or 1)
    jobs = [
        (compiler, sources[i : i + batch])
        for compiler, repeated in SOURCES
        for sources in [[*dict.fromkeys(repeated)]]
        for i in range(0, len(sources), batch)
    ]
    total, done = sum(len(sources) for _, sources in jobs), 0
    for compiler, sources in jobs:
        compiler.compile(sources)
        done += len(sources)
        print(f"{done} of {total} sources", flush=True)
    emulated.load()
    emulator_build.program()
    emulated_ablations.library()


if __name__ == "__main__":
    main()
