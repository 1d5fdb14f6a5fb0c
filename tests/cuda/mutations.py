# SPDX-License-Identifier: BSD-3-Clause
"""Mistakes in the kernels of 16 and 32 bits, each of which the tests must find."""

from dataclasses import dataclass
from pathlib import Path

from emulator_build import INSTANCES_FOLDER


@dataclass(frozen=True)
class Target:
    """What mutants are of: the source that is compiled again, and the cases that must fail,
    plainly and, where a mutant needs it, under ThreadSanitizer."""

    source: Path
    cases: tuple[str, ...]
    thread_cases: tuple[str, ...] = ()


# Of the decode kernels the one that the short cases need.
DECODE = Target(INSTANCES_FOLDER / "lean_decode_bf16_64.cu", ("decode_short",), ("decode_short",))
# Of 128 columns and 128 rows, where o passes through shared memory in two parts.
WIDE = Target(INSTANCES_FOLDER / "lean_decode_bf16_128.cu", ("decode_wide",))
ADDRESSES = Target(DECODE.source, ("decode_addresses_short",))
# The fix-up alone, where rows need more scratch memory than there is.
FIXUP = Target(Path("tests/cuda_emulator/test_fixup.cpp"), ("fixup_short",))


@dataclass(frozen=True)
class Mutation:
    name: str
    file: str  # in csrc
    old: str  # occurs exactly once
    new: str
    # Whether the emulated device may give right results.
    only_thread_sanitizer: bool = False
    target: Target = DECODE


# Of the loop over tiles in lean_decode.cuh.
KEY_BARRIER = (
    "    sync_key_group<Config>();  // the keys are there, the stage of the tile before is free\n"
)
FILL = "    loader.fill(ring, Config::kFetchesNextOutput ? last_output : number);\n"

OF_DECODE = [
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
        "    __syncwarp();\n",
        "",
        only_thread_sanitizer=True,
    ),
    Mutation(
        "the warps of a key group do not wait for each other's copies",
        "cuda/decode/tile_copies.cuh",
        "  } else {\n    __syncthreads();\n  }\n}\n",
        "  }\n}\n",
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
        "        sync_key_group<Config>();\n",
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
        "cp_async_16(destination, source, exists ? 16 : 0);",
        "cp_async_16(destination, source, 16);",
    ),
    Mutation(
        "a copy is of the page of another key",
        "cuda/decode/tile_copies.cuh",
        "held, static_cast<uint32_t>(Copies::key(i)) % 32",
        "held, static_cast<uint32_t>(Copies::key(i)) / 2 % 32",
    ),
    Mutation(
        "whole tiles come from the page of their first keys",
        "cuda/decode/loader.cuh",
        "source + places.of_copy(i) + columns(head_dim, i),",
        "source + places.of_copy(0) + columns(head_dim, i),",
    ),
    Mutation(
        "chunks that are further down are not permuted",
        "cuda/decode/tile_config.cuh",
        "(turn(rows) ^ low) * 16",
        "low * 16",
    ),
    Mutation(
        "the keys of the next tile are those of this one",
        "cuda/decode/loader.cuh",
        "k_ += Config::kTileKeys * params_.decode.k_stride[2];",
        "",
    ),
    Mutation(
        "a tile past the end is requested whole",
        "cuda/decode/loader.cuh",
        "keys.has_gaps ? 0 : (keys.end - keys.begin) / Config::kTileKeys;",
        "keys.has_gaps ? 0 : next_.output().num_tiles();",
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
        "if constexpr (Config::kQuerySlots == 1) __syncthreads();",
        "",
    ),
    # Fragments and shared memory.
    Mutation(
        "fragments of keys are swapped",
        "cuda/decode/tile_mma.cuh",
        "mma<Element>(s[n + 1], q, k[2], k[3]);",
        "mma<Element>(s[n + 1], q, k[3], k[2]);",
    ),
    Mutation(
        "fragments of values are swapped",
        "cuda/decode/tile_mma.cuh",
        "mma<Element>(o_[2 * i], a, v[0], v[1]);",
        "mma<Element>(o_[2 * i], a, v[0], v[2]);",
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
        "return kTurns == 8 ? row & 7 : row >> 1 & 3;",
        "return 0;",
    ),
    # The end of an output.
    Mutation(
        "warps are combined before all have stored",
        "cuda/decode/combine_warps.cuh",
        "    __syncthreads();\n    for (int row =",
        "    for (int row =",
    ),
    Mutation(
        "o overwrites keys that another lane still reads",
        "cuda/decode/combine_warps.cuh",
        "  sync_key_group<Config>();  // its keys and values in the stage have been read\n",
        "",
        only_thread_sanitizer=True,
    ),
    Mutation(
        "o overwrites the keys of another group",
        "cuda/decode/combine_warps.cuh",
        "group * (kHalfBytes / Config::kKeyGroups);",
        "(Config::kKeyGroups - 1 - group) * (kHalfBytes / Config::kKeyGroups);",
        only_thread_sanitizer=True,
    ),
    Mutation(
        "the next columns overwrite those that are read",
        "cuda/decode/combine_warps.cuh",
        "    if (begin > 0) __syncthreads();  // before the next columns\n",
        "",
        target=WIDE,
    ),
    Mutation(
        "a stage is filled while o is read from it",
        "cuda/decode/lean_decode.cuh",
        "      __syncthreads();  // before the stage is filled\n",
        "",
    ),
    Mutation(
        "threads do not wait to hear whether they are last",
        "cuda/decode/fixup.cuh",
        "  __syncthreads();\n  return *flag;",
        "  return *flag;",
    ),
    Mutation(
        "what is said about the last is overwritten",
        "cuda/decode/fixup.cuh",
        "scratch + kArrivalFlag",
        "scratch",
    ),
    Mutation(
        "the next rows' lse overwrite those that are merged",
        "cuda/decode/fixup.cuh",
        "      __syncthreads();  // before the scratch memory is written again\n",
        "",
        target=FIXUP,
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
        "weights are used before they are all computed",
        "cuda/decode/fixup.cuh",
        "      __syncthreads();  // before weights are used\n",
        "",
    ),
    Mutation(
        "weights are relative to a sum of some parts",
        "cuda/decode/fixup.cuh",
        "sum += __shfl_xor_sync(0xffffffff, sum, bit);",
        "sum += bit > 1 ? 0.0f : __shfl_xor_sync(0xffffffff, sum, bit);",
    ),
    Mutation(
        "a lane has one part of a row",
        "cuda/decode/fixup.cuh",
        "lane + i * num_lanes < count_; };",
        "i == 0 && lane < count_; };",
        target=FIXUP,
    ),
    Mutation(
        "nobody finds the contributors of an output",
        "cuda/decode/lean_decode.cuh",
        "      meanwhile();\n",
        "",
    ),
    Mutation(
        "a merge takes a part twice",
        "cuda/decode/fixup.cuh",
        "others_ + part * stride_",
        "others_ + (part | 1) * stride_",
    ),
    Mutation(
        "contributors differ in where levels end",
        "cuda/decode/fixup.cuh",
        "max_merged_parts(num_rows));",
        "max_merged_parts(blockIdx.x % 2 == 0 ? 1 : 9));",
        target=FIXUP,
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
        "the block's range is read before it is known",
        "cuda/decode/schedule.cuh",
        "  }\n  __syncthreads();\n  if (num_units > BlockRange::kMaxKeys) {",
        "  }\n  if (num_units > BlockRange::kMaxKeys) {",
    ),
    Mutation(
        "key ranges are read before they are there",
        "cuda/decode/schedule.cuh",
        "    }\n    __syncthreads();\n  }\n  return true;",
        "    }\n  }\n  return true;",
    ),
    Mutation(
        "the range that the host knows is read before it is written",
        "cuda/decode/schedule.cuh",
        "      __syncthreads();\n      return true;\n",
        "      return true;\n",
    ),
    Mutation(
        "the host's line has no remainder",
        "cuda/decode/schedule.cuh",
        "line.quotient + line.workers.quotient(worker * line.remainder);",
        "line.quotient;",
    ),
    Mutation(
        "copies of no bytes come from beyond the last key",
        "cuda/decode/loader.cuh",
        "min(Copies::key(i), last) - Copies::key(0)",
        "Copies::key(i) - Copies::key(0)",
        target=ADDRESSES,
    ),
    Mutation(
        "copies of no bytes come from beyond the last column",
        "cuda/decode/loader.cuh",
        "return is_in(head_dim, i) ? Copies::chunk(i) * kChunkElements<Cached> : 0;",
        "return Copies::chunk(i) * kChunkElements<Cached>;",
        target=ADDRESSES,
    ),
    Mutation(
        "copies of no bytes come from beyond the last query",
        "cuda/decode/loader.cuh",
        "min(row, rows.count - 1)",
        "row",
        target=ADDRESSES,
    ),
    # Arithmetic.
    Mutation(
        "a key past the range is seen",
        "cuda/decode/softmax.cuh",
        "key + further < end_[row]",
        "key + further <= end_[row]",
    ),
    Mutation(
        "sums are not rescaled",
        "cuda/decode/softmax.cuh",
        "      sum[i] *= factor[i];\n",
        "",
    ),
]
