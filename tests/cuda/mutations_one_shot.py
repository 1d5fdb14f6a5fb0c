# SPDX-License-Identifier: BSD-3-Clause
"""Mistakes in the kernel of the one-shot exchange."""

from pathlib import Path

from mutations import Mutation, Target

ONE_SHOT = Target(
    Path("csrc/cuda/one_shot/one_shot.cu"),
    tuple(f"one_shot_{name}" for name in
          ("worlds", "epochs", "missing_rank", "abort", "sizes_that_differ")),
    ("one_shot_short",),
)  # fmt: skip


def one_shot(name: str, old: str, new: str, only_thread_sanitizer: bool = False) -> Mutation:
    return Mutation(name, "cuda/one_shot/one_shot.cu", old, new, only_thread_sanitizer, ONE_SHOT)


OF_ONE_SHOT = [
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
