// SPDX-License-Identifier: BSD-3-Clause
//
// Products of few rows of activations with rows of weights, by each instruction set.
#pragma once

#include <cstdint>

#include "common/dtype.h"

namespace tree_attention::cpu {

enum class Vectors;

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

void multiply_rows_portable(const WeightRows& w);
#if defined(__x86_64__)
void multiply_rows_avx2(const WeightRows& w);
void multiply_rows_avx512(const WeightRows& w);
void multiply_rows_avx512_bf16(const WeightRows& w);
#elif defined(__aarch64__)
void multiply_rows_neon(const WeightRows& w);
#endif

using MultiplyRows = void (*)(const WeightRows& w);
MultiplyRows rows_multiplied_by(Vectors vectors);

// By the vectors of the instruction set in use.
void multiply_rows(const WeightRows& w);

}  // namespace tree_attention::cpu
