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

// out[i, row] = sum over k of weights[i, k] * x[row, k] in float32, with the same bits for any
// number of rows. x [rows, n], weights [count, n], out [count, rows], all contiguous.
struct WeightRows {
  static constexpr int64_t kMaxRows = 16;

  DataType x_dtype, dtype;  // float32 or of 16 bits; the same, or int8
  const void* x;
  int64_t rows;
  const void* weights;
  int64_t count, n;
  int64_t group_size;   // as ExpertParams has it
  const float* scales;  // [count, n / group_size] where weights have 4 bits
  float* workspace;     // workspace_floats()
  float* out;

  // Each row rounded up to 64 elements.
  int64_t workspace_floats() const { return rows * ((n + 63) / 64 * 64); }
};

struct Kernels {
  const char* name;

  // The most rows of an output: what shares one pass over K and V.
  int64_t (*max_rows)(const DecodeParams& params);

  // Bytes of scratch memory that attend needs, aligned to 64.
  size_t (*workspace_bytes)(const DecodeParams& params, int64_t num_rows);

  // The state of `rows` over their keys in `keys`: o [rows.count, head_dim_v], lse [rows.count].
  void (*attend)(const DecodeParams& params, const Rows& rows, KeyRange keys, void* workspace,
                 float* o, float* lse);

  // Writes a complete state to params.o and params.lse.
  void (*store)(const DecodeParams& params, const Rows& rows, const float* o, const float* lse);

  void (*multiply_weight_rows)(const WeightRows& w);
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
