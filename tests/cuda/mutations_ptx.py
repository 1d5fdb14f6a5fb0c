# SPDX-License-Identifier: BSD-3-Clause
"""Mistakes in the instructions of csrc/cuda/ptx.h that running the kernels' source cannot show.
Each must be found by the known answers where the PTX that nvcc makes of them is run."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutation:
    """What is replaced wherever it occurs in one function of ptx.h."""

    name: str
    function: str
    replaced: dict[str, str]
    ends: bool = True  # or the program waits for ever


# The compiler may move, merge and drop what it believes to be a function of its operands. Without
# the clobber alone nvcc's PTX is the same: to it a volatile asm reads and writes all memory.
PURE = {"asm volatile": "asm", ': "memory"': ""}
# Positions of operands in d, a, b, c of mma.
D_AND_A, A, B = "{%0, %1, %2, %3}, {%4", "{%4, %5, %6, %7}", "{%8, %9}"

MUTATIONS = [
    Mutation("low and high are swapped", "cvt_bf16x2", {"%1, %2": "%2, %1"}),
    Mutation("low and high are swapped", "cvt_f16x2", {"%1, %2": "%2, %1"}),
    Mutation("float16 for bfloat16", "cvt_bf16x2", {"cvt.rn.bf16x2": "cvt.rn.f16x2"}),
    Mutation("a is added, c multiplied", "fma_f16x2", {"%1, %2, %3": "%3, %2, %1"}),
    Mutation("b is left out", "add_f16x2", {"%1, %2": "%1, %1"}),
    Mutation("a power for a logarithm", "lg2", {"lg2.approx": "ex2.approx"}),
    Mutation("operands are swapped", "prmt", {"%1, %2, %3": "%2, %1, %3"}),
    Mutation("halves of b are swapped", "mma_m16n8k16_bf16", {B: "{%9, %8}"}),
    Mutation("halves of b are swapped", "mma_m16n8k16_f16", {B: "{%9, %8}"}),
    Mutation("quarters of a are swapped", "mma_m16n8k16_bf16", {A: "{%4, %6, %5, %7}"}),
    Mutation("rows of d are swapped", "mma_m16n8k16_f16", {D_AND_A: "{%2, %3, %0, %1}, {%4"}),
    Mutation("float16 for bfloat16", "mma_m16n8k16_bf16", {".bf16.bf16.": ".f16.f16."}),
    Mutation("sums come from nowhere", "mma_m16n8k16_bf16", {'"+f"': '"=f"'}),
    Mutation("matrices are swapped", "ldmatrix_x4", {"%1, %2": "%2, %1"}),
    Mutation("nothing is transposed", "ldmatrix_x4_trans", {".trans": ""}),
    Mutation(
        "nothing is moved", "movmatrix_trans", {"movmatrix.sync.aligned.m8n8.trans.b16": "mov.b32"}
    ),
    Mutation("all bytes are zeros", "cp_async_16", {'"r"(num_bytes)': '"r"(16 - num_bytes)'}),
    Mutation("all bytes are zeros", "cp_async_4", {'"r"(num_bytes)': '"r"(4 - num_bytes)'}),
    Mutation("copies are in no group", "cp_async_commit_group", {"cp.async.commit_group;": ""}),
    Mutation("one group is left out", "cp_async_wait_group", {"(kPending)": "(kPending + 1)"}),
    Mutation("it counts one further", "atomic_inc_acq_rel", {"(limit)": "(limit + 1)"}),
    Mutation("address and value are swapped", "store_release_system", {"[%0], %1;": "[%1], %0;"}),
    Mutation("registers are swapped", "st_global_v2", {"{%1, %2}": "{%2, %1}"}),
    Mutation("rows are loaded once", "ldmatrix_x4", PURE),
    Mutation("only some counts are made", "atomic_inc_acq_rel", PURE),
    Mutation("a flag is loaded once", "load_acquire_system", PURE, ends=False),
    Mutation("the clock is read once", "globaltimer", {"asm volatile": "asm"}, ends=False),
]
