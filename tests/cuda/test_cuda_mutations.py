# SPDX-License-Identifier: BSD-3-Clause
"""Tests of the tests: each of these mistakes in a copy of the kernels must be found by the cases on
the emulated device, some of them only under ThreadSanitizer."""

import os
import shutil
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

import emulator_build
from compilation import ROOT, Compiler
from mutations import OF_DECODE, Mutation, Target
from mutations_8_bits import OF_8_BITS
from mutations_columns import OF_COLUMNS
from mutations_latents import OF_LATENTS
from mutations_one_shot import OF_ONE_SHOT
from mutations_ranges import OF_RANGES
from mutations_row_blocks import OF_ROW_BLOCKS
from mutations_swapped import OF_SWAPPED

MUTATIONS = [
    *(*OF_DECODE, *OF_8_BITS, *OF_COLUMNS, *OF_LATENTS, *OF_ONE_SHOT, *OF_ROW_BLOCKS),
    *(*OF_RANGES, *OF_SWAPPED),
]


@dataclass(frozen=True, eq=False)  # a compiler has lists, which have no hash
class Kind:
    name: str
    time_limit: int  # seconds of a run
    compiler: Compiler
    launcher: tuple[str, ...] = ()

    def build(self, compiler: Compiler, name: str, target: Target) -> Path:
        """The program with what `compiler` makes of the target's source."""
        sources = [*emulator_build.EMULATOR, *emulator_build.TESTS, *emulator_build.LAUNCHES]
        rest = self.compiler.compile([source for source in sources if source != target.source])
        # First: of inline functions and templates the linker takes the first it meets.
        return compiler.link(
            name, [*compiler.compile([target.source]), *rest], emulator_build.PARTIAL_LINK_FLAGS
        )

    def run(self, program: Path, target: Target) -> str:
        """The error that the program reports, or nothing."""
        cases = target.thread_cases if self is THREAD else target.cases
        command = [*self.launcher, str(program), *cases]
        environment = os.environ | {"TSAN_OPTIONS": "halt_on_error=1"}
        try:
            result = subprocess.run(
                command, capture_output=True, text=True, timeout=self.time_limit, env=environment
            )
        except subprocess.TimeoutExpired:
            return "it does not end"
        # A mutant may also end by a signal, without a word.
        return result.stderr or f"status {result.returncode}" if result.returncode != 0 else ""


def has_fixed_addresses() -> bool:
    return shutil.which("setarch") is not None and (
        subprocess.run(["setarch", "-R", "true"], capture_output=True).returncode == 0
    )


PLAIN = Kind("plain", 60, emulator_build.COMPILER)
THREAD = Kind(
    "thread",
    180,
    replace(
        emulator_build.COMPILER,
        build=ROOT / "build" / "cuda_emulator_thread",
        flags=[*emulator_build.FLAGS, "-O1", "-fsanitize=thread"],
    ),
    # ThreadSanitizer's shadow memory collides with addresses that some kernels randomise.
    ("setarch", "-R") if has_fixed_addresses() else (),
)


def kind_of(mutation: Mutation) -> Kind:
    return THREAD if mutation.only_thread_sanitizer else PLAIN


def report(mutation: Mutation, folder: Path) -> str:
    """What the decode cases say of a mutant."""
    shutil.copytree(ROOT / "csrc", folder / "csrc")
    source = folder / mutation.target.source
    if not source.exists():  # a test that has kernels of its own
        source.parent.mkdir(parents=True)
        shutil.copy(ROOT / mutation.target.source, source)
    file = folder / "csrc" / mutation.file
    text = file.read_text()
    assert text.count(mutation.old) == 1, f"{mutation.file}: {mutation.old}"
    file.write_text(text.replace(mutation.old, mutation.new))
    kind = kind_of(mutation)
    flags = [
        f"-I{ROOT}/{flag[2:]}" if flag.startswith("-Itests") else flag
        for flag in kind.compiler.flags
    ]
    mutant = replace(kind.compiler, build=folder, flags=[*flags, "-O0", "-g0"], root=folder)
    return kind.run(kind.build(mutant, "mutant", mutation.target), mutation.target)


# Those that a mutant stands beside. scripts/sanitize.sh runs other kernels under ThreadSanitizer.
@pytest.mark.parametrize(
    "kind, target",
    dict.fromkeys((kind_of(mutation), mutation.target) for mutation in MUTATIONS),
    ids=lambda value: value.cases[0] if isinstance(value, Target) else value.name,
)
def test_without_mutation(kind: Kind, target: Target) -> None:
    name = f"without_mutation_{target.source.stem}"
    assert kind.run(kind.build(kind.compiler, name, target), target) == ""


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_mutation(mutation: Mutation, tmp_path: Path) -> None:
    text = report(mutation, tmp_path)
    assert text, "not found"
    assert ("data race" in text) == mutation.only_thread_sanitizer, text
