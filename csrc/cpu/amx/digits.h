// SPDX-License-Identifier: BSD-3-Clause
//
// Scores of keys of int8 for few rows, in integers. Converting a key to bfloat16 costs more than
// its product with up to 8 queries. So the queries become integers: an element is d0 * 2^16 + d1 *
// 2^8 + d2 in units of 2^-21 of the power of two below the row's largest, with digits of -128 to
// 127. Elements above 2^-15 of the largest are exact, the others off by 2^-22 of it at most, and
// the sums of products are exact.
#pragma once

#include <immintrin.h>

#include <cfloat>
#include <cstdint>

#include "common/decode_params.h"
#include "common/dtype.h"
#include "common/rows.h"
#include "cpu/amx/packing.h"
#include "cpu/amx/tiles.h"
#include "cpu/vector/row_state.h"
#include "cpu/vector/simd.h"

namespace tree_attention::cpu {
namespace {

constexpr int kDigits = 3, kDigitBits = 8, kLeadingBits = 21;
constexpr int kGroupRows = 4;                        // whose digits are the columns of a tile
constexpr int kDigitColumns = kDigits * kGroupRows;  // digit 0 of the rows, digit 1, digit 2
constexpr int kTileBytes = 64;                       // of a key, in a tile
constexpr int kColumnBytes = 4;                      // of a column of a tile with digits
constexpr int64_t kDigitTile = kTileBytes * kDigitColumns;
constexpr int kProductStride = 16;  // of the rows of products, in elements

// Where the tile begins that holds dim d: the last one overlaps the one before it.
inline int64_t tile_begin(int64_t d, int64_t head_dim) {
  return d + kTileBytes <= head_dim ? d : head_dim - kTileBytes;
}

// The digits of the queries of `rows`, as the matrix unit takes them, four dims of a column side by
// side: `out` [groups of rows, tiles of dims, 16, kDigitColumns, 4]. weights [kDigits,
// kColumns]: what the products with each digit are to be multiplied by. False if a query is not
// finite, or so small that its weights might be subnormal.
template <int kColumns>
inline bool pack_digits(const DecodeParams& p, const Rows& rows, int8_t* out, float* weights) {
  const int64_t num_tiles = (p.head_dim + kTileBytes - 1) / kTileBytes;
  __builtin_memset(out, 0, kColumns / kGroupRows * num_tiles * kDigitTile);
  for (int64_t row = 0; row < rows.count; ++row) {
    const BFloat16* source = query_of_row<BFloat16>(p, rows, row);
    const auto load_query = [&](int64_t d) {
      const auto* bits = reinterpret_cast<const __m256i*>(source + d);
      return _mm512_castsi512_ps(
          _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(bits)), 16));
    };
    Vec magnitudes = zero();
    for (int64_t d = 0; d < p.head_dim; d += kLanes) {
      const Vec magnitude = abs(load_query(d));
      if (_mm512_cmp_ps_mask(magnitude, broadcast(FLT_MAX), _CMP_NLE_UQ) != 0) return false;
      magnitudes = max_keep_nan(magnitudes, magnitude);
    }
    const float largest = reduce_max(magnitudes);
    if (0.0f < largest && largest < 0x1p-100f) return false;
    const int exponent = largest == 0.0f ? 0 : __builtin_ilogbf(largest);
    const float unit = __builtin_ldexpf(1.0f, exponent - kLeadingBits);
    for (int digit = 0; digit < kDigits; ++digit) {
      weights[digit * kColumns + row] = __builtin_ldexpf(unit, kDigitBits * (kDigits - 1 - digit));
    }
    int8_t* group =
        out + row / kGroupRows * num_tiles * kDigitTile + row % kGroupRows * kColumnBytes;
    for (int64_t d = 0; d < p.head_dim; d += kLanes) {
      const int64_t tile = d / kTileBytes, first = tile_begin(tile * kTileBytes, p.head_dim);
      int8_t* place = group + tile * kDigitTile + (d - first) * kDigitColumns;
      __m512i left = _mm512_cvtps_epi32(mul(load_query(d), broadcast(1.0f / unit)));
      for (int digit = kDigits - 1; digit >= 0; --digit) {
        const __m512i value = _mm512_srai_epi32(_mm512_slli_epi32(left, 24), 24);
        left = _mm512_srai_epi32(_mm512_sub_epi32(left, value), kDigitBits);
        alignas(16) int8_t bytes[kLanes];
        _mm_store_si128(reinterpret_cast<__m128i*>(bytes), _mm512_cvtepi32_epi8(value));
        for (int i = 0; i < kLanes; i += kColumnBytes) {
          __builtin_memcpy(place + digit * kGroupRows * kColumnBytes + i * kDigitColumns, bytes + i,
                           kColumnBytes);
        }
      }
    }
  }
  return true;
}

// scores [32 keys, kColumns] = k [2, 16 keys, head_dim] times the transpose of q [kColumns,
// head_dim], whose `digits` and `weights` are from pack_digits.
template <int kColumns, typename Prefetch>
inline void score_digits(const KeyTile (&k)[2], const int8_t* digits, const float* weights,
                         int64_t head_dim, int32_t* products, float* scores, Prefetch& next) {
  const KeyTile first = k[0], second = k[1];
  constexpr int kGroups = kColumns / kGroupRows, kStride = kGroups * kProductStride;
  for (int group = 0; group < kGroups; ++group) {
    _tile_zero(0);
    _tile_zero(1);
    for (int64_t d = 0; d < head_dim; d += kTileBytes, digits += kDigitTile) {
      next.fetch(2 * Prefetch::kScores / kGroups);
      const int64_t begin = tile_begin(d, head_dim);
      _tile_loadd(3, digits, kColumnBytes * kDigitColumns);
      _tile_loadd(2, first.rows + begin, first.stride);
      _tile_dpbssd(0, 2, 3);
      _tile_loadd(2, second.rows + begin, second.stride);
      _tile_dpbssd(1, 2, 3);
    }
    int32_t* of_group = products + group * kProductStride;
    _tile_stored(0, of_group, kStride * sizeof(int32_t));
    _tile_stored(1, of_group + kTileRows * kStride, kStride * sizeof(int32_t));
  }
  finish_stores();
  Vec factors[kDigits];
  for (int i = 0; i < kDigits; ++i) factors[i] = load_columns<kColumns>(weights + i * kColumns);
  // Four lanes are a digit of the rows of a group, of a key.
  for (int i = 0; i < kStepKeys * kColumns / kLanes; ++i) {
    const int32_t* from = products + i * 4 * kProductStride;
    __m512i x[4];
    for (int j = 0; j < 4; ++j) x[j] = _mm512_load_si512(from + j * kProductStride);
    const __m512i ab = _mm512_shuffle_i32x4(x[0], x[1], 0x44);
    const __m512i cd = _mm512_shuffle_i32x4(x[2], x[3], 0x44);
    const __m512i of_digit[] = {_mm512_shuffle_i32x4(ab, cd, 0x88),
                                _mm512_shuffle_i32x4(ab, cd, 0xdd),
                                _mm512_shuffle_i32x4(_mm512_shuffle_i32x4(x[0], x[1], 0xee),
                                                     _mm512_shuffle_i32x4(x[2], x[3], 0xee), 0x88)};
    Vec score = mul(_mm512_cvtepi32_ps(of_digit[kDigits - 1]), factors[kDigits - 1]);
    for (int digit = kDigits - 2; digit >= 0; --digit) {
      score = fma(_mm512_cvtepi32_ps(of_digit[digit]), factors[digit], score);
    }
    store(scores + i * kLanes, score);
  }
}

}  // namespace
}  // namespace tree_attention::cpu
