# SPDX-License-Identifier: BSD-3-Clause
"""Tests of the tests: each of these mistakes in a copy of the kernels must be found by the cases on
the emulated device, some of them only under ThreadSanitizer."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

import emulator_build
from compilation import ROOT, Compiler


@dataclass(frozen=True)
class Target:
    """What mutants are of: the source that is compiled again, and the cases that must fail."""

    source: Path
    cases: tuple[str, ...]
    thread_cases: tuple[str, ...]


# Of the decode kernels the one that the short cases need.
DECODE = Target(
    Path("csrc/cuda/instantiations/lean_decode_bf16_64.cu"), ("decode_short",), ("decode_short",)
)
ONE_SHOT = Target(
    Path("csrc/cuda/one_shot/one_shot.cu"),
    tuple(f"one_shot_{name}" for name in
          ("worlds", "epochs", "missing_rank", "abort", "sizes_that_differ")),
    ("one_shot_short",),
)  # fmt: skip


@dataclass(frozen=True)
class Mutation:
    name: str
    file: str  # in csrc
    old: str  # occurs exactly once
    new: str
    # Whether the emulated device may give right results.
    only_thread_sanitizer: bool = False
    target: Target = DECODE


def one_shot(name: str, old: str, new: str, only_thread_sanitizer: bool = False) -> Mutation:
    return Mutation(name, "cuda/one_shot/one_shot.cu", old, new, only_thread_sanitizer, ONE_SHOT)


# Of the loop over tiles in lean_decode.cuh.
KEY_BARRIER = (
    "    TileCopies<Config>::sync();  // the keys are there, the stage of the tile before is free\n"
)
FILL = "    loader.fill(ring, number + 1);\n"

MUTATIONS = [
    # The ring and what is requested into it.
    Mutation(
        "keys of the last tile are not waited for",
        "cuda/decode/ring.cuh",
        "cp_async_wait_group<kPending>();",
        "cp_async_wait_group<2 * kPending>();",
    ),
    Mutation(
        "keys are waited for too late by one group",
        "cuda/decode/ring.cuh",
        "wait<1>();",
        "wait<2>();",
    ),
    Mutation(
        "values are waited for too late by one group",
        "cuda/decode/ring.cuh",
        "wait<0>();",
        "wait<1>();",
    ),
    Mutation(
        "values are not waited for",
        "cuda/decode/lean_decode.cuh",
        "        ring.wait_for_values();\n",
        "",
    ),
    Mutation(
        "a warp does not wait for its other lanes' copies",
        "cuda/decode/tile_copies.cuh",
        "      __syncwarp();\n",
        "",
        only_thread_sanitizer=True,
    ),
    Mutation(
        "the warps of a key group do not wait for each other's copies",
        "cuda/decode/tile_copies.cuh",
        "    } else {\n      __syncthreads();\n    }\n  }\n",
        "    }\n  }\n",
    ),
    Mutation(
        "keys are read before the other lanes' copies are there",
        "cuda/decode/lean_decode.cuh",
        KEY_BARRIER + FILL,
        FILL,
    ),
    Mutation(
        "values are read before the other lanes' copies are there",
        "cuda/decode/lean_decode.cuh",
        "        TileCopies<Config>::sync();\n",
        "",
    ),
    Mutation(
        "a stage is filled while it is read",
        "cuda/decode/ring.cuh",
        "return num_tiles_ < params_.num_stages;",
        "return num_tiles_ <= params_.num_stages;",
    ),
    Mutation(
        "a stage is filled before the barrier that frees it",
        "cuda/decode/lean_decode.cuh",
        KEY_BARRIER + FILL,
        FILL + KEY_BARRIER,
    ),
    Mutation(
        "keys past the end are fetched",
        "cuda/decode/loader.cuh",
        "row + chunk * Config::kChunkElements, exists ? 16 : 0",
        "row + chunk * Config::kChunkElements, 16",
    ),
    Mutation(
        "queries are read before they are there",
        "cuda/decode/lean_decode.cuh",
        "  __syncthreads();  // all threads fetched the queries\n",
        "",
    ),
    Mutation(
        "the next queries are fetched while these are read",
        "cuda/decode/lean_decode.cuh",
        "  if constexpr (Config::kQuerySlots == 1) __syncthreads();",
        "",
    ),
    # Fragments and shared memory.
    Mutation(
        "fragments of keys are swapped",
        "cuda/decode/tile_mma.cuh",
        "mma(s[n + 1], q, k[2], k[3]);",
        "mma(s[n + 1], q, k[3], k[2]);",
    ),
    Mutation(
        "fragments of values are swapped",
        "cuda/decode/tile_mma.cuh",
        "mma(o_[2 * i], a, v[0], v[1]);",
        "mma(o_[2 * i], a, v[0], v[2]);",
    ),
    Mutation(
        "values are not transposed",
        "cuda/decode/tile_mma.cuh",
        "ldmatrix_x4_trans(",
        "ldmatrix_x4(",
    ),
    Mutation(
        "chunks are not spread over the banks",
        "cuda/decode/tile_config.cuh",
        "chunk ^ (row & 7)",
        "chunk",
    ),
    # The end of an output.
    Mutation(
        "warps are combined before all have stored",
        "cuda/decode/combine_warps.cuh",
        "    __syncthreads();\n    for (int i = threadIdx.x;",
        "    for (int i = threadIdx.x;",
    ),
    Mutation(
        "the next columns overwrite those that are read",
        "cuda/decode/combine_warps.cuh",
        "    __syncthreads();  // before the next columns\n",
        "",
    ),
    Mutation(
        "threads do not wait to hear whether they are last",
        "cuda/decode/fixup.cuh",
        "  __syncthreads();\n  const bool is_last = *flag;",
        "  const bool is_last = *flag;",
    ),
    Mutation(
        "what is said about the last is overwritten",
        "cuda/decode/fixup.cuh",
        "  __syncthreads();  // before the flag is written again\n",
        "",
        only_thread_sanitizer=True,
    ),
    Mutation(
        "arrival releases and acquires nothing",
        "cuda/decode/fixup.cuh",
        "*flag = atomic_inc_acq_rel(counter, limit) == limit;",
        "*flag = __atomic_fetch_add(counter, limit + 1 > 1 ? 1 : 0,"
        " __ATOMIC_RELAXED) == limit && (__atomic_store_n(counter, 0,"
        " __ATOMIC_RELAXED), true);",
        only_thread_sanitizer=True,
    ),
    Mutation(
        "counters do not return to zero",
        "cuda/decode/fixup.cuh",
        "atomic_inc_acq_rel(counter, limit) == limit;",
        "atomic_inc_acq_rel(counter, UINT32_MAX) == limit;",
    ),
    Mutation(
        "the last to arrive is the last but one",
        "cuda/decode/fixup.cuh",
        "static_cast<uint32_t>(expected) - 1;",
        "static_cast<uint32_t>(expected) - 1 - (expected > 2);",
    ),
    Mutation(
        "weights are computed before all states are loaded",
        "cuda/decode/fixup.cuh",
        "    __syncthreads();\n    for (int step = 1;",
        "    for (int step = 1;",
    ),
    Mutation(
        "weights are used before they are all computed",
        "cuda/decode/fixup.cuh",
        "      }\n      __syncthreads();\n    }\n",
        "      }\n    }\n",
    ),
    Mutation(
        "lse and weights share memory",
        "cuda/decode/fixup.cuh",
        "scratch + kMaxNodes * sizeof(float)",
        "scratch",
    ),
    Mutation(
        "a merge takes a part twice",
        "cuda/decode/fixup.cuh",
        "others_ + part * stride_",
        "others_ + (part | 1) * stride_",
    ),
    Mutation(
        "two levels of merges share a counter",
        "common/fixup.h",
        "partial_slot(workers, first + level)",
        "partial_slot(workers, first)",
    ),
    Mutation(
        "the first contributor waits for the others",
        "cuda/decode/fixup.cuh",
        "        return arrive(counters + counter,",
        "        const bool is_first = blockIdx.x == workers.first;\n"
        "        while (is_first && load_acquire(counters + counter) + 1 < expected) {}\n"
        "        return arrive(counters + counter,",
    ),
    # The schedule.
    Mutation(
        "warps add sums that are not there",
        "cuda/decode/schedule.cuh",
        "  __syncthreads();\n  Sums sums{value, 0};",
        "  Sums sums{value, 0};",
    ),
    Mutation(
        "the next sums overwrite those that are read",
        "cuda/decode/schedule.cuh",
        "  __syncthreads();  // before the next call's writes\n",
        "",
        only_thread_sanitizer=True,
    ),
    Mutation(
        "the first unit is read before it is known",
        "cuda/decode/schedule.cuh",
        "  __syncthreads();\n  const int unit = memory.range.first_unit",
        "  const int unit = memory.range.first_unit",
    ),
    Mutation(
        "key ranges are read before they are there",
        "cuda/decode/schedule.cuh",
        "  }\n  __syncthreads();\n  return true;",
        "  }\n  return true;",
    ),
    # Arithmetic.
    Mutation(
        "a key past the range is seen",
        "cuda/decode/softmax.cuh",
        "key + column < end_[row]",
        "key + column <= end_[row]",
    ),
    Mutation(
        "sums are not rescaled",
        "cuda/decode/softmax.cuh",
        "        sum[i] *= factor[i];\n",
        "",
    ),
    # The one-shot exchange.
    one_shot(
        "flags are raised before all threads have sent",
        "  __syncthreads();  // the flags speak for all threads\n",
        "",
    ),
    one_shot(
        "flags release nothing",
        "store_release_system(flag_in(peer, p_.rank), value);",
        "__atomic_store_n(flag_in(peer, p_.rank), value, __ATOMIC_RELAXED);",
        only_thread_sanitizer=True,
    ),
    one_shot(
        "waits acquire nothing",
        "const uint64_t value = load_acquire_system(flag);",
        "load_acquire_system(&p_.host->timeout);"
        " const uint64_t value = __atomic_load_n(flag, __ATOMIC_RELAXED);",
        only_thread_sanitizer=True,
    ),
    one_shot(
        "threads merge before the waiting ones have seen the flags",
        "  __syncthreads();  // all threads see what the waiting ones saw\n",
        "",
    ),
    one_shot(
        "one slot for all epochs",
        "(parity() * p_.world_size + source) * p_.slot_bytes",
        "source * p_.slot_bytes",
    ),
    one_shot(
        "one flag for all epochs",
        "const int block = parity() * kOneShotMaxBlocks + ",
        "const int block = ",
    ),
    one_shot(
        "flags of any epoch are taken",
        "if (value == expected) return",
        "if (value != 0) return",
    ),
    one_shot(
        "states are merged in the order of sending",
        "const char* slot = slot_in(p_.rank, source);",
        "const char* slot = slot_in(p_.rank, (p_.rank + source) % p_.world_size);",
    ),
    one_shot(
        "a missing rank is waited for without end",
        "now - begin > load_acquire_system(&p_.host->timeout)",
        "now < begin",
    ),
    one_shot(
        "an abort is not heard",
        "if (load_acquire_system(&p_.host->aborted) != 0)",
        "if (now < begin)",
    ),
    one_shot(
        "other sizes are taken for a missing rank",
        "if (value >> 32 == epoch_) return",
        "if (value >> 32 == ~epoch_) return",
    ),
    one_shot(
        "a result is given although a rank is missing",
        "  if (*all_came) {\n",
        "  if (*all_came < 2) {\n",
    ),
    one_shot(
        "a failed rank goes on",
        "if (control.failed != 0) {",
        "if (control.failed == UINT32_MAX) {",
    ),
    one_shot(
        "the first block to end changes the epoch",
        "if (atomic_inc_acq_rel(&control.arrived, gridDim.x - 1) == gridDim.x - 1) {",
        "if (atomic_inc_acq_rel(&control.arrived, gridDim.x - 1) == 0) {",
    ),
]

LINK_FLAGS = ["-no-pie", "-Wl,--unresolved-symbols=ignore-in-object-files"]
TIME_LIMIT = 60


@dataclass(frozen=True)
class Kind:
    compiler: Compiler
    launcher: tuple[str, ...] = ()

    def build(self, compiler: Compiler, name: str, target: Target) -> Path:
        """The program with what `compiler` makes of the target's source."""
        sources = [*emulator_build.EMULATOR, *emulator_build.TESTS, *emulator_build.LAUNCHES]
        rest = self.compiler.compile([source for source in sources if source != target.source])
        # First: of inline functions and templates the linker takes the first it meets.
        return compiler.link(name, [*compiler.compile([target.source]), *rest], LINK_FLAGS)

    def run(self, program: Path, target: Target) -> str:
        """The error that the program reports, or nothing."""
        cases = target.thread_cases if self is THREAD else target.cases
        command = [*self.launcher, str(program), *cases]
        environment = os.environ | {"TSAN_OPTIONS": "halt_on_error=1"}
        try:
            result = subprocess.run(
                command, capture_output=True, text=True, timeout=TIME_LIMIT, env=environment
            )
        except subprocess.TimeoutExpired:
            return "it does not end"
        return result.stderr if result.returncode != 0 else ""


def has_fixed_addresses() -> bool:
    return shutil.which("setarch") is not None and (
        subprocess.run(["setarch", "-R", "true"], capture_output=True).returncode == 0
    )


PLAIN = Kind(emulator_build.COMPILER)
THREAD = Kind(
    Compiler(
        ROOT / "build" / "cuda_emulator_thread",
        [*emulator_build.FLAGS, "-O1", "-fsanitize=thread"],
    ),
    # ThreadSanitizer's shadow memory collides with addresses that some kernels randomise.
    ("setarch", "-R") if has_fixed_addresses() else (),
)


def kind_of(mutation: Mutation) -> Kind:
    return THREAD if mutation.only_thread_sanitizer else PLAIN


def report(mutation: Mutation, folder: Path) -> str:
    """What the decode cases say of a mutant."""
    shutil.copytree(ROOT / "csrc", folder / "csrc")
    file = folder / "csrc" / mutation.file
    text = file.read_text()
    assert text.count(mutation.old) == 1, f"{mutation.file}: {mutation.old}"
    file.write_text(text.replace(mutation.old, mutation.new))
    kind = kind_of(mutation)
    flags = [
        f"-I{ROOT}/{flag[2:]}" if flag.startswith("-Itests") else flag
        for flag in kind.compiler.flags
    ]
    mutant = Compiler(folder, [*flags, "-O0", "-g0"], root=folder)
    return kind.run(kind.build(mutant, "tests", mutation.target), mutation.target)


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[Mutation, Future[str]]]:
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield {m: pool.submit(report, m, tmp_path_factory.mktemp("mutant")) for m in MUTATIONS}
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("target", [DECODE, ONE_SHOT], ids=["decode", "one_shot"])
@pytest.mark.parametrize("kind", [PLAIN, THREAD], ids=["plain", "thread"])
def test_without_mutation(kind: Kind, target: Target) -> None:
    name = f"without_mutation_{target.source.stem}"
    assert kind.run(kind.build(kind.compiler, name, target), target) == ""


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_mutation(mutation: Mutation, reports: dict[Mutation, Future[str]]) -> None:
    text = reports[mutation].result()
    assert text, "not found"
    assert ("data race" in text) == mutation.only_thread_sanitizer, text
