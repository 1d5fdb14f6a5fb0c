// SPDX-License-Identifier: BSD-3-Clause
//
// Queries, values and weights as operands of AMX tiles, pairs of bfloat16 side by side; and vectors
// with the scores of few rows for several keys.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "common/decode_params.h"
#include "common/dtype.h"
#include "common/rows.h"
#include "cpu/amx/tiles.h"
#include "cpu/bf16/eight_bits.h"
#include "cpu/bf16/pairs.h"
#include "cpu/vector/keys.h"
#include "cpu/vector/row_state.h"
#include "cpu/vector/simd.h"

namespace tree_attention::cpu {
namespace {

// out [num_rows / columns, head_dim / 32, 16 pairs of dims, columns] = the queries of `rows`,
// paired as keys of type T are; those past the last row are zeros.
template <typename T>
inline void pack_queries(const DecodeParams& p, const Rows& rows, int64_t num_rows, int columns,
                         uint32_t* out) {
  for (int64_t first = 0; first < num_rows; first += columns) {
    const BFloat16* sources[kTileRows] = {};
    for (int i = 0; i < columns && first + i < rows.count; ++i) {
      sources[i] = query_of_row<BFloat16>(p, rows, first + i);
    }
    for (int64_t d = 0; d < p.head_dim; d += kTilePair) {
      __m512i pairs[kTileRows];
      for (int i = 0; i < kTileRows; ++i) {
        pairs[i] = sources[i] == nullptr ? __m512i{} : _mm512_loadu_si512(sources[i] + d);
        if constexpr (kIsScaled<T>) pairs[i] = interleave_halves(pairs[i]);
      }
      transpose(pairs);
      for (int i = 0; i < kTileRows; ++i, out += columns) {
        _mm512_mask_storeu_epi32(out, first_lanes(columns), pairs[i]);
      }
    }
  }
}

// Dims [d, d + 32) of values 2 i and 2 i + 1 of a step as pairs: of the even dims and of the odd
// ones, but of elements of 8 bits of the first 16 and of the last. Values past the end of the step
// are zeros, since 0 * NaN is NaN.
template <typename T>
class ValuePairs {
 public:
  ValuePairs(const Step<T>& step, int i)
      : first_(step.v[2 * i]),
        second_(step.v[2 * i + 1]),
        has_first_(2 * i < step.count),
        has_second_(2 * i + 1 < step.count) {}

  void load(int64_t d, __m512i& even, __m512i& odd) const {
    if constexpr (kIsScaled<T>) {
      alignas(64) static constexpr T zeros[kTilePair] = {};
      pair_rows(has_first_ ? first_ + d : zeros, has_second_ ? second_ + d : zeros, even, odd);
    } else {
      const __m512i low_half = _mm512_set1_epi32(0xffff);
      const __m512i a = has_first_ ? _mm512_loadu_si512(first_ + d) : __m512i{};
      const __m512i b = has_second_ ? _mm512_loadu_si512(second_ + d) : __m512i{};
      // (low_half & x) | (~low_half & y)
      even = _mm512_ternarylogic_epi32(low_half, a, _mm512_slli_epi32(b, 16), 0xca);
      odd = _mm512_ternarylogic_epi32(low_half, _mm512_srli_epi32(a, 16), b, 0xca);
    }
  }

 private:
  const T *first_, *second_;
  bool has_first_, has_second_;
};

// The values of a step as FewRowsMemory::v.
template <typename T, typename Prefetch>
inline void pack_values(const Step<T>& step, int64_t head_dim, Prefetch& next, uint32_t* out) {
  for (int i = 0; i < kTileRows; ++i, out += kTileRows) {
    next.fetch(Prefetch::kInterleaving * static_cast<int>(head_dim / kTilePair));
    const ValuePairs<T> pairs(step, i);
    for (int64_t d = 0; d < head_dim; d += kTilePair) {
      __m512i even, odd;
      pairs.load(d, even, odd);
      _mm512_store_si512(out + d * kTileRows, even);
      _mm512_store_si512(out + d * kTileRows + kTileWords, odd);
    }
  }
}

// 32 dims of the values of a step as two tiles of TileRowsMemory::v.
template <typename T>
inline void pack_transposed_values(const Step<T>& step, int64_t d, uint32_t* tiles) {
  __m512i even[kTileRows], odd[kTileRows];
  for (int i = 0; i < kTileRows; ++i) ValuePairs<T>(step, i).load(d, even[i], odd[i]);
  transpose(even);
  transpose(odd);
  for (int i = 0; i < kTileRows; ++i) {
    _mm512_store_si512(tiles + i * kTileRows, even[i]);
    _mm512_store_si512(tiles + kTileWords + i * kTileRows, odd[i]);
  }
}

// The pair (a, b) of each lane, rounded to bfloat16.
inline __m512i round_pairs(Vec a, Vec b) {
  return interleave_halves(reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(b, a)));
}

// What is left of (a, b) after rounding them to `pairs`.
inline void subtract_rounded(__m512i pairs, Vec& a, Vec& b) {
  Vec rounded_a, rounded_b;
  split_bfloat16(pairs, rounded_a, rounded_b);
  a = sub(a, rounded_a);
  b = sub(b, rounded_b);
}

// Weights [32 keys, 16 rows], one key in a vector, to P [16 rows, 32 keys].
inline void store_weights(Vec (&weights)[kStepKeys], const FewRowsMemory& m) {
  __m512i pairs[kTileRows];
  uint16_t* const terms[] = {m.high, m.low};
  for (uint16_t* term : terms) {
    for (int i = 0; i < kTileRows; ++i) {
      pairs[i] = round_pairs(weights[2 * i], weights[2 * i + 1]);
      subtract_rounded(pairs[i], weights[2 * i], weights[2 * i + 1]);
    }
    transpose(pairs);
    for (int row = 0; row < kTileRows; ++row) {
      _mm512_store_si512(term + row * kStepKeys, pairs[row]);
    }
  }
}

// Transposes the 8 x 8 matrices of 32-bit elements in the two halves of the vectors, in place.
inline void transpose_halves(__m512i (&x)[8]) {
  const __m512i low = _mm512_setr_epi64(0, 1, 8, 9, 4, 5, 12, 13);
  const __m512i high = _mm512_setr_epi64(2, 3, 10, 11, 6, 7, 14, 15);
  __m512i y[8];
  for (int i = 0; i < 8; i += 2) {
    y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
    y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    x[i] = _mm512_unpacklo_epi64(y[i], y[i + 2]);
    x[i + 1] = _mm512_unpackhi_epi64(y[i], y[i + 2]);
    x[i + 2] = _mm512_unpacklo_epi64(y[i + 1], y[i + 3]);
    x[i + 3] = _mm512_unpackhi_epi64(y[i + 1], y[i + 3]);
  }
  for (int j = 0; j < 4; ++j) {
    y[j] = _mm512_permutex2var_epi64(x[j], low, x[j + 4]);
    y[j + 4] = _mm512_permutex2var_epi64(x[j], high, x[j + 4]);
  }
  for (int j = 0; j < 8; ++j) x[j] = y[j];
}

// Weights [32 keys, 8 rows], two keys in a vector, to P [8 rows, 32 keys].
inline void store_weights(Vec (&weights)[kStepKeys / 2], const FewRowsMemory& m) {
  Vec even[8], odd[8];  // of key pairs i and i + 8
  for (int i = 0; i < 8; ++i) {
    even[i] = _mm512_shuffle_f32x4(weights[i], weights[i + 8], 0x44);
    odd[i] = _mm512_shuffle_f32x4(weights[i], weights[i + 8], 0xee);
  }
  uint16_t* const terms[] = {m.high, m.low};
  for (uint16_t* term : terms) {
    __m512i pairs[8];
    for (int i = 0; i < 8; ++i) {
      pairs[i] = round_pairs(even[i], odd[i]);
      subtract_rounded(pairs[i], even[i], odd[i]);
    }
    transpose_halves(pairs);
    for (int row = 0; row < 8; ++row) _mm512_store_si512(term + row * kStepKeys, pairs[row]);
  }
}

// Weights [32 keys, 4 rows], four keys in a vector, to P [4 rows, 32 keys].
inline void store_weights(Vec (&weights)[kStepKeys / 4], const FewRowsMemory& m) {
  const __m512i in_order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  Vec rows[2][4];  // of 16 keys
  for (int half = 0; half < 2; ++half) {
    const Vec* w = weights + 4 * half;
    const Vec a = _mm512_unpacklo_ps(w[0], w[2]), b = _mm512_unpacklo_ps(w[1], w[3]);
    const Vec c = _mm512_unpackhi_ps(w[0], w[2]), d = _mm512_unpackhi_ps(w[1], w[3]);
    const Vec by_row[4] = {_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b),
                           _mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d)};
    for (int row = 0; row < 4; ++row) {
      rows[half][row] = _mm512_permutexvar_ps(in_order, by_row[row]);
    }
  }
  const auto widen = [](__m256i x, Vec& wide) {
    wide = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
  };
  for (int row = 0; row < 4; ++row) {
    const Vec a = rows[0][row], b = rows[1][row];
    const __m512i high = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(b, a));
    Vec high_a, high_b;
    widen(_mm512_castsi512_si256(high), high_a);
    widen(_mm512_extracti64x4_epi64(high, 1), high_b);
    _mm512_store_si512(m.high + row * kStepKeys, high);
    _mm512_store_si512(m.low + row * kStepKeys, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(
                                                    sub(b, high_b), sub(a, high_a))));
  }
}

// kColumns numbers, repeated to fill a vector.
template <int kColumns>
inline Vec load_columns(const float* p) {
  if constexpr (kColumns == 4) return _mm512_broadcast_f32x4(_mm_loadu_ps(p));
  if constexpr (kColumns == 8) return _mm512_broadcast_f32x8(_mm256_loadu_ps(p));
  return load(p);
}

// Loads a number per key for a vector of load_columns: all lanes of a key get its number.
template <int kColumns>
inline Vec load_keys(const float* p) {
  if constexpr (kColumns == 4) {
    const __m512i key_of_lane = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
    return _mm512_permutevar_ps(_mm512_broadcast_f32x4(_mm_loadu_ps(p)), key_of_lane);
  }
  if constexpr (kColumns == 8) {
    return _mm512_insertf32x8(broadcast(p[0]), _mm256_set1_ps(p[1]), 1);
  }
  return broadcast(p[0]);
}

// The maximum and the sum over the keys in a vector [16 / kColumns keys, kColumns], in all of its
// lanes.
template <int kColumns>
inline Vec max_of_keys(Vec x) {
  if constexpr (kColumns <= 8) x = max_keep_nan(x, _mm512_shuffle_f32x4(x, x, 0x4e));
  if constexpr (kColumns == 4) x = max_keep_nan(x, _mm512_shuffle_f32x4(x, x, 0xb1));
  return x;
}
template <int kColumns>
inline Vec sum_of_keys(Vec x) {
  if constexpr (kColumns <= 8) x = add(x, _mm512_shuffle_f32x4(x, x, 0x4e));
  if constexpr (kColumns == 4) x = add(x, _mm512_shuffle_f32x4(x, x, 0xb1));
  return x;
}

}  // namespace
}  // namespace tree_attention::cpu
