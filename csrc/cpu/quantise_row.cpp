// SPDX-License-Identifier: BSD-3-Clause
#include "cpu/quantise_row.h"

#include <cstring>

#include "common/quantise.h"
#include "cpu/multiversioned.h"

namespace tree_attention::cpu {
namespace {

MULTIVERSIONED uint32_t largest_magnitude(const float* x, int64_t n) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t magnitude = magnitude_bits(x[i]);
    largest = magnitude > largest ? magnitude : largest;
  }
  return largest;
}

MULTIVERSIONED void divide_and_round(const float* x, int64_t n, float scale, Int8* out) {
  for (int64_t i = 0; i < n; ++i) out[i] = quantised<Int8>(x[i] / scale);
}

MULTIVERSIONED void divide_and_round(const float* x, int64_t n, float scale, Float8* out) {
  for (int64_t i = 0; i < n; ++i) out[i] = quantised<Float8>(x[i] / scale);
}

template <typename T>
void quantise(const float* x, int64_t n, T* out, float* scale) {
  *scale = scale_of_row<T>(largest_magnitude(x, n));
  if (*scale > 0.0f) {
    divide_and_round(x, n, *scale, out);
  } else {
    std::memset(out, 0, n);
  }
}

}  // namespace

void quantise_row(const float* x, int64_t n, Int8* out, float* scale) {
  quantise(x, n, out, scale);
}

void quantise_row(const float* x, int64_t n, Float8* out, float* scale) {
  if (scale == nullptr) {
    divide_and_round(x, n, 1.0f, out);
  } else {
    quantise(x, n, out, scale);
  }
}

}  // namespace tree_attention::cpu
