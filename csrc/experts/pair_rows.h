// SPDX-License-Identifier: BSD-3-Clause
//
// Products of few rows of bfloat16 activations with rows of weights, by products of pairs.
#pragma once

#include <cstdint>

#include "cpu/bf16/elements.h"
#include "experts/vector_rows.h"

namespace tree_attention::cpu {
namespace {

template <int kRows, typename Weight>
inline void pair_dots(const BFloat16* x, int64_t stride, const float* half_sums,
                      const Weight* weights, int64_t n, const DotLoader<Weight>& loader,
                      float* out) {
  Vec sums[kRows][2];
  for (auto& row : sums) row[0] = row[1] = zero();
  for_pieces(n, loader, [&](int64_t k, const auto& load_weights) {
    __m512i w[2];
    for (int line = 0; line < kDotElements * static_cast<int>(sizeof(Weight)); line += 64) {
      __builtin_prefetch(reinterpret_cast<const char*>(weights + k) + kAhead + line);
    }
    load_weights(weights + k, w);
    for (int row = 0; row < kRows; ++row) {
      const BFloat16* const from = x + row * stride + k;
      sums[row][0] = dot(_mm512_loadu_si512(from), w[0], sums[row][0]);
      sums[row][1] = dot(_mm512_loadu_si512(from + kHalfElements), w[1], sums[row][1]);
    }
  });
  for (int row = 0; row < kRows; ++row) {
    out[row] = reduce_add(add(sums[row][0], sums[row][1])) - half_sums[row];
  }
}

// The rows of activations, in the order of loaded weights and padded with zeros, and half of their
// sums, for weights that exceed the true ones by a half.
template <typename Weight>
inline void multiply_pairs(const WeightRows& w) {
  const int64_t stride = dot_stride(w.n);
  auto* const x = reinterpret_cast<BFloat16*>(w.workspace);
  float half_sums[WeightRows::kMaxRows] = {};
  const __m512i halves = _mm512_set1_epi16(0x3f00);  // 1/2
  for (int64_t row = 0; row < w.rows; ++row) {
    BFloat16* const to = x + row * stride;
    __builtin_memset(to, 0, stride * sizeof(BFloat16));
    __builtin_memcpy(to, static_cast<const BFloat16*>(w.x) + row * w.n, w.n * sizeof(BFloat16));
    Vec sum = zero();
    for (int64_t k = 0; k < stride; k += kDotElements) {
      arrange(static_cast<const Weight*>(nullptr), to + k);
      if constexpr (kExceedsByHalf<Weight>) {
        sum = dot(_mm512_loadu_si512(to + k), halves, sum);
        sum = dot(_mm512_loadu_si512(to + k + kHalfElements), halves, sum);
      }
    }
    half_sums[row] = reduce_add(sum);
  }
  const DotLoader<Weight> loader;
  const auto* const weights = static_cast<const Weight*>(w.weights);
  for_rows(w, [&]<int kRows>(int64_t i, int64_t row) {
    pair_dots<kRows>(x + row * stride, stride, half_sums + row, weights + i * w.n, w.n, loader,
                     w.out + i * w.rows + row);
  });
}

// The numbers of a block of ExpertParams::kPacked in bfloat16, by a table of 32 that is looked up
// by five bits of an index: the fifth is of the other number, so that the table has each number
// twice.
inline void unpack_pairs(const uint8_t* p, __m512i table, __m512i (&values)[2]) {
  const __m512i bytes =
      _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  values[0] = _mm512_permutexvar_epi16(bytes, table);
  values[1] = _mm512_permutexvar_epi16(_mm512_srli_epi16(bytes, 4), table);
}

inline __m512i table_of_numbers() {
  alignas(64) uint16_t table[32];
  for (int i = 0; i < 32; ++i) {
    const float number = static_cast<float>(i % 16 - 8);
    uint32_t bits;
    __builtin_memcpy(&bits, &number, sizeof(bits));
    table[i] = static_cast<uint16_t>(bits >> 16);
  }
  return _mm512_load_si512(table);
}

// group_dots, of pairs.
template <int kRows, int kBlocks>
inline void group_pair_dots(const BFloat16* x, const uint8_t* weights, __m512i table,
                            const float* scales, int64_t n, float* out) {
  Vec totals[kRows];
  for (Vec& total : totals) total = zero();
  for (const BFloat16* const end = x + n; x < end; ++scales) {
    Vec sums[kRows];
    for (Vec& sum : sums) sum = zero();
    for (int block = 0; block < kBlocks; ++block) {
      __m512i values[2];
      __builtin_prefetch(weights + kAhead);
      unpack_pairs(weights, table, values);
      for (int row = 0; row < kRows; ++row) {
        for (int half = 0; half < 2; ++half) {
          const BFloat16* const from = x + row * n + half * kHalfElements;
          sums[row] = dot(values[half], _mm512_loadu_si512(from), sums[row]);
        }
      }
      weights += ExpertParams::kPacked / 2;
      x += ExpertParams::kPacked;
    }
    const Vec scale = broadcast(*scales);
    for (int row = 0; row < kRows; ++row) totals[row] = fma(scale, sums[row], totals[row]);
  }
  for (int row = 0; row < kRows; ++row) out[row] = reduce_add(totals[row]);
}

template <int kBlocks>
inline void multiply_packed_pairs(const WeightRows& w) {
  const __m512i table = table_of_numbers();
  const auto* const x = static_cast<const BFloat16*>(w.x);
  const auto* const packed = static_cast<const uint8_t*>(w.weights);
  for_rows(w, [&]<int kRows>(int64_t i, int64_t row) {
    group_pair_dots<kRows, kBlocks>(x + row * w.n, packed + i * w.n / 2, table,
                                    w.scales + i * (w.n / w.group_size), w.n,
                                    w.out + i * w.rows + row);
  });
}

inline void multiply_weight_rows_in_pairs(const WeightRows& w) {
  if (w.x_dtype != DataType::kBFloat16) return multiply_weight_rows(w);
  if (w.group_size == ExpertParams::kPacked) return multiply_packed_pairs<1>(w);
  if (w.group_size == 2 * ExpertParams::kPacked) return multiply_packed_pairs<2>(w);
  return w.dtype == DataType::kInt8 ? multiply_pairs<Int8>(w) : multiply_pairs<BFloat16>(w);
}

}  // namespace
}  // namespace tree_attention::cpu
