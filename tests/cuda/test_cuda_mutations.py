# SPDX-License-Identifier: BSD-3-Clause
"""Tests of the tests: csrc/cuda says of some of its lines what goes wrong "without this". A copy of
the kernels without such a line must fail the cases on the emulated device, some of them only under
ThreadSanitizer."""

import os
import re
import shutil
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

import emulator_build
from compilation import ROOT, Compiler
from emulator_build import INSTANCES_FOLDER


@dataclass(frozen=True)
class Target:
    """What is compiled without the line: a source, and the cases that must fail."""

    source: Path
    cases: tuple[str, ...]


def decode(instance: str, *cases: str) -> Target:
    return Target(INSTANCES_FOLDER / f"lean_decode_{instance}.cu", cases)


SHORT = decode("bf16_64", "decode_short")
# Of 128 columns and 128 rows, where o passes through shared memory in two parts.
WIDE = decode("bf16_128", "decode_wide")
CLUSTERS = decode("bf16_64", "decode_clusters_short")
INT8 = decode("bf16_int8_64", "decode_int8_short")
COLUMNS = decode("bf16_int8_256", "decode_columns_short")
WGMMA = decode("wgmma_bf16_576", "decode_wgmma_short")
TOKENS = decode("wgmma_bf16_64", "decode_wgmma_tokens")
ONE_SHOT = Target(
    Path("csrc/cuda/one_shot/one_shot.cu"),
    tuple(
        f"one_shot_{name}"
        for name in ("worlds", "epochs", "missing_rank", "abort", "sizes_that_differ")
    ),
)
# By the words in the sources; WGMMA finds those of its files, and SHORT the others.
FOUND_BY = {
    "the next columns overwrite those that are read": WIDE,
    "states are merged before all blocks of the cluster have stored them": CLUSTERS,
    "a stage is filled, or its block ends, while another block reads it": CLUSTERS,
    "products of the other columns are not waited for": COLUMNS,
    "the scales of keys are dropped": INT8,
    "the scales of values are dropped": INT8,
    "a NaN among the scales reaches rows that do not see its key": INT8,
    "units stay relative to an older maximum": INT8,
    "tiles take no mask for tokens after the first 32": TOKENS,
    "flags are raised before all threads have sent": ONE_SHOT,
    "threads merge before the waiting ones have seen the flags": ONE_SHOT,
}
# The emulated device may give right results.
RACES = {
    "a warp reads what its other threads have not copied",
    "o overwrites keys that another thread still reads",
}
WITHOUT = re.compile(r"^ *// Without this: (.*)\.\n.*\n", re.MULTILINE)


@dataclass(frozen=True)
class Line:
    """A line of csrc/cuda, and what goes wrong without it."""

    file: Path
    says: str

    def removed(self, text: str) -> str:
        return WITHOUT.sub(lambda found: "" if found[1] == self.says else found[0], text)


LINES = [
    Line(file.relative_to(ROOT), says)
    for file in sorted((ROOT / "csrc/cuda").rglob("*.cu*"))
    for says in WITHOUT.findall(file.read_text())
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

    def run(self, program: Path, target: Target, patience: int = 1) -> str:
        """The error that the program reports, or nothing."""
        command = [*self.launcher, str(program), *target.cases]
        environment = os.environ | {"TSAN_OPTIONS": "halt_on_error=1"}
        try:
            result = subprocess.run(
                command,
                capture_output=True,
                text=True,
                timeout=patience * self.time_limit,
                env=environment,
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
    emulator_build.THREAD_COMPILER,
    # ThreadSanitizer's shadow memory collides with addresses that some kernels randomise.
    ("setarch", "-R") if has_fixed_addresses() else (),
)


def kind_of(line: Line) -> Kind:
    return THREAD if line.says in RACES else PLAIN


def target_of(line: Line) -> Target:
    return FOUND_BY.get(line.says, WGMMA if "wgmma" in line.file.name else SHORT)


def report(line: Line, folder: Path) -> str:
    """What the cases say of the kernels without a line."""
    target, kind = target_of(line), kind_of(line)
    shutil.copytree(ROOT / "csrc", folder / "csrc")
    source = folder / target.source
    if not source.exists():  # a test that has kernels of its own
        source.parent.mkdir(parents=True)
        shutil.copy(ROOT / target.source, source)
    file = folder / line.file
    file.write_text(line.removed(file.read_text()))
    flags = [
        f"-I{ROOT}/{flag[2:]}" if flag.startswith("-Itests") else flag
        for flag in kind.compiler.flags
    ]
    mutant = replace(kind.compiler, build=folder, flags=[*flags, "-O0", "-g0"], root=folder)
    return kind.run(kind.build(mutant, "mutant", target), target)


def test_all_words_are_read() -> None:
    found = [line.says for line in LINES]
    assert len(found) == len(set(found)) > 25
    assert {*FOUND_BY, *RACES} <= {*found}


# Those that a mutant stands beside. scripts/sanitize.sh runs other kernels under ThreadSanitizer.
@pytest.mark.parametrize(
    "kind, target",
    dict.fromkeys((kind_of(line), target_of(line)) for line in LINES),
    ids=lambda value: value.cases[0] if isinstance(value, Target) else value.name,
)
def test_with_all_lines(kind: Kind, target: Target) -> None:
    name = f"with_all_lines_{target.source.stem}"
    program = kind.build(kind.compiler, name, target)
    assert kind.run(program, target, patience=4) == ""


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.says)
def test_without_a_line(line: Line, tmp_path: Path) -> None:
    text = report(line, tmp_path)
    assert text, "not found"
    assert ("data race" in text) == (line.says in RACES), text
