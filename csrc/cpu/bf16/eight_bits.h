// SPDX-License-Identifier: BSD-3-Clause
//
// Elements of 8 bits to pairs of bfloat16, without an error. a and b are kTilePair elements:
//   pair_rows:   pair i of `low` is (a[i], b[i]), of `high` (a[16 + i], b[16 + i])
//   pair_halves: pair i of `first` is (a[i], a[16 + i]), of `second` (b[i], b[16 + i])
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "common/dtype.h"
#include "cpu/vector/keys.h"
#include "cpu/vector/simd.h"

namespace tree_attention::cpu {
namespace {

constexpr int kTileRows = 16, kTilePair = 32;  // a tile: 16 rows of 32 bfloat16 or 16 float32
static_assert(kStepKeys == 2 * kTileRows && kPair == kTilePair);

inline __m512i to_pairs(Vec a, Vec b) {
  // Their low halves are zeros: 8 bits are exact in bfloat16.
  return _mm512_or_si512(_mm512_srli_epi32(_mm512_castps_si512(a), 16), _mm512_castps_si512(b));
}

inline void pair_rows(const Int8* a, const Int8* b, __m512i& low, __m512i& high) {
  Vec of_a[2], of_b[2];
  load_pair(a, of_a[0], of_a[1]);
  load_pair(b, of_b[0], of_b[1]);
  low = to_pairs(of_a[0], of_b[0]);
  high = to_pairs(of_a[1], of_b[1]);
}
inline void pair_halves(const Int8* a, const Int8* b, __m512i& first, __m512i& second) {
  Vec of_a[2], of_b[2];
  load_pair(a, of_a[0], of_a[1]);
  load_pair(b, of_b[0], of_b[1]);
  first = to_pairs(of_a[0], of_a[1]);
  second = to_pairs(of_b[0], of_b[1]);
}

// The bytes of the bfloat16 of every float8 without a sign.
struct Float8Table {
  alignas(64) uint8_t low[128] = {}, high[128] = {};

  constexpr Float8Table() {
    for (int i = 0; i < 128; ++i) {
      int exponent = i >> 3, mantissa = i & 7;
      if (i == 0) continue;
      if (exponent == 0) {  // subnormal
        for (exponent = 1; (mantissa & 8) == 0; --exponent) mantissa <<= 1;
      }
      const int bits = i == 127 ? 0x7fc0 : (exponent + 127 - 7) << 7 | (mantissa & 7) << 4;
      low[i] = static_cast<uint8_t>(bits & 0xff);
      high[i] = static_cast<uint8_t>(bits >> 8);
    }
  }
};
constexpr Float8Table kFloat8Table;

// Where _mm512_unpacklo_epi8 and _mm512_unpackhi_epi8 want the bytes of a and b, which lie one
// after the other: element i of a pair's first and second in the vectors of the pairs.
struct ByteOrder {
  alignas(64) uint8_t bytes[64] = {};

  constexpr ByteOrder(int vector_distance, int second_distance) {
    for (int i = 0; i < kTileRows; ++i) {
      for (int second = 0; second < 2; ++second) {
        uint8_t* place = bytes + i / 4 * 16 + i % 4 * 2 + second;
        place[0] = static_cast<uint8_t>(i + second * second_distance);
        place[8] = static_cast<uint8_t>(i + second * second_distance + vector_distance);
      }
    }
  }
};
constexpr ByteOrder kRowOrder(16, 32), kHalfOrder(32, 16);

inline void look_up(const Float8* a, const Float8* b, const ByteOrder& order, __m512i& low,
                    __m512i& high) {
  const __m512i rows = _mm512_inserti64x4(
      _mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(a))),
      _mm256_loadu_si256(reinterpret_cast<const __m256i*>(b)), 1);
  const __m512i x = _mm512_permutexvar_epi8(_mm512_load_si512(order.bytes), rows);
  const auto find = [&](const uint8_t* table) {
    return _mm512_permutex2var_epi8(_mm512_load_si512(table), x, _mm512_load_si512(table + 64));
  };
  const __m512i low_bytes = find(kFloat8Table.low);
  const __m512i sign = _mm512_set1_epi8(static_cast<char>(0x80));
  // high | (x & sign)
  const __m512i high_bytes = _mm512_ternarylogic_epi32(find(kFloat8Table.high), x, sign, 0xf8);
  low = _mm512_unpacklo_epi8(low_bytes, high_bytes);
  high = _mm512_unpackhi_epi8(low_bytes, high_bytes);
}
inline void pair_rows(const Float8* a, const Float8* b, __m512i& low, __m512i& high) {
  look_up(a, b, kRowOrder, low, high);
}
inline void pair_halves(const Float8* a, const Float8* b, __m512i& first, __m512i& second) {
  look_up(a, b, kHalfOrder, first, second);
}

}  // namespace
}  // namespace tree_attention::cpu
