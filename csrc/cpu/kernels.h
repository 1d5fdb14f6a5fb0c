// SPDX-License-Identifier: BSD-3-Clause
//
// What an instruction set provides: the work on one output of the lean schedule.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/decode_params.h"
#include "common/dtype.h"
#include "common/rows.h"

namespace tree_attention::cpu {

// Keys per tile of the lean schedule.
constexpr int kTileKeys = 64;

// The vectors of an instruction set. Operators other than attention choose their kernel by these.
enum class Vectors {
  kPortable,
#if defined(__x86_64__)
  kAvx2,
  kAvx512,
  kAvx512Bf16,
#elif defined(__aarch64__)
  kNeon,
#endif
};

struct Kernels {
  const char* name;
  Vectors vectors;

  // The most rows of an output: what shares one pass over K and V.
  int64_t (*max_rows)(const DecodeParams& params);

  // Bytes of scratch memory that attend needs, aligned to 64.
  size_t (*workspace_bytes)(const DecodeParams& params, int64_t num_rows);

  // The state of `rows` over their keys in `keys`: o [rows.count, head_dim_v], lse [rows.count].
  void (*attend)(const DecodeParams& params, const Rows& rows, KeyRange keys, void* workspace,
                 float* o, float* lse);

  // Writes a complete state to params.o and params.lse.
  void (*store)(const DecodeParams& params, const Rows& rows, const float* o, const float* lse);
};

extern const Kernels portable_kernels;
#if defined(__x86_64__)
extern const Kernels avx2_kernels, avx512_kernels, avx512_bf16_kernels, amx_kernels;
#elif defined(__aarch64__)
extern const Kernels neon_kernels, neon_bf16_kernels;
#endif

// The kernels in use (instruction_set.cpp).
const Kernels& kernels();

}  // namespace tree_attention::cpu
