// SPDX-License-Identifier: BSD-3-Clause
#include "cpu/sum_rows.h"

#include <algorithm>
#include <bit>

#include "cpu/multiversioned.h"
#include "cpu/parallel.h"

namespace tree_attention::cpu {
namespace {

// Sums that stay in the first-level cache while row after row is added.
constexpr int64_t kBlock = 2048;
// Numbers of a row for which another thread pays.
constexpr int64_t kGrain = 32 << 10;

MULTIVERSIONED void add(const float* row, float* total, int64_t count) {
  for (int64_t i = 0; i < count; ++i) total[i] += row[i];
}

MULTIVERSIONED void add(const BFloat16* row, float* total, int64_t count) {
  for (int64_t i = 0; i < count; ++i) total[i] += std::bit_cast<float>(uint32_t{row[i].bits} << 16);
}

void round(const float* total, float* out, int64_t count) { std::copy_n(total, count, out); }

// To the nearest, of two equally near ones to the even; a NaN stays one.
MULTIVERSIONED void round(const float* total, BFloat16* out, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t bits = std::bit_cast<uint32_t>(total[i]);
    const uint32_t rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
    const bool is_nan = (bits & 0x7FFFFFFF) > 0x7F800000;
    out[i].bits = static_cast<uint16_t>(is_nan ? 0x7FC0 : rounded);
  }
}

template <typename Element>
void sum(const std::vector<const void*>& rows, int64_t count, Element* out) {
  parallel_for(0, (count + kBlock - 1) / kBlock, kGrain / kBlock, [&](int64_t begin, int64_t end) {
    float total[kBlock];
    for (int64_t first = begin * kBlock; first < std::min(end * kBlock, count); first += kBlock) {
      const int64_t size = std::min(kBlock, count - first);
      std::fill_n(total, size, -0.0f);  // to which any first number adds as it is
      for (const void* row : rows) add(static_cast<const Element*>(row) + first, total, size);
      round(total, out + first, size);
    }
  });
}

}  // namespace

void sum_rows(const std::vector<const void*>& rows, int64_t count, DataType dtype, void* out) {
  if (dtype == DataType::kFloat32) {
    sum(rows, count, static_cast<float*>(out));
  } else if (dtype == DataType::kBFloat16) {
    sum(rows, count, static_cast<BFloat16*>(out));
  } else {
    refuse_dtype(dtype);
  }
}

}  // namespace tree_attention::cpu
