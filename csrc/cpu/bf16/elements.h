// SPDX-License-Identifier: BSD-3-Clause
//
// Rows of keys and values as bfloat16, kDotElements elements at a time, in the order that costs
// least: see arrange and restore_order.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "common/dtype.h"
#include "cpu/bf16/eight_bits.h"
#include "cpu/bf16/pairs.h"
#include "cpu/vector/simd.h"
#include "cpu/vector/steps.h"

namespace tree_attention::cpu {
namespace {

// Elements of a row that are taken at a time, as two vectors of bfloat16 in the order of memory.
constexpr int kDotElements = 64;
constexpr int kHalfElements = kDotElements / 2;

// Queries are kept as they are, in rows of this length, padded with zeros.
inline int64_t dot_stride(int64_t head_dim) {
  return (head_dim + kDotElements - 1) / kDotElements * kDotElements;
}

// Loads kDotElements elements, or the first n, of a row as bfloat16 (operator()), or of two rows as
// pairs of them (pair).
template <typename T>
class DotLoader;

template <>
class DotLoader<BFloat16> {
 public:
  void operator()(const BFloat16* p, __m512i (&x)[2]) const {
    x[0] = _mm512_loadu_si512(p);
    x[1] = _mm512_loadu_si512(p + kHalfElements);
  }
  void operator()(const BFloat16* p, __m512i (&x)[2], int n) const {
    x[0] = load_16_bit(p, n);
    x[1] = n <= kHalfElements ? __m512i{} : load_16_bit(p + kHalfElements, n - kHalfElements);
  }

  template <typename... Size>
  void pair(const BFloat16* p, const BFloat16* q, __m512i (&pairs)[4], Size... n) const {
    __m512i a[2], b[2];
    (*this)(p, a, n...);
    (*this)(q, b, n...);
    for (int half = 0; half < 2; ++half) {
      pairs[2 * half] = _mm512_unpacklo_epi16(a[half], b[half]);
      pairs[2 * half + 1] = _mm512_unpackhi_epi16(a[half], b[half]);
    }
  }
};

// The bytes of the bfloat16 of i + 1/2. Every element of int8 is one of these, or its negative,
// less 1/2: with a sign of its own it takes two tables instead of four.
struct Int8Table {
  alignas(64) uint8_t low[128] = {}, high[128] = {};

  constexpr Int8Table() {
    for (int i = 0; i < 128; ++i) {
      const auto bits = __builtin_bit_cast(uint32_t, static_cast<float>(i) + 0.5f);
      low[i] = static_cast<uint8_t>(bits >> 16);
      high[i] = static_cast<uint8_t>(bits >> 24);
    }
  }
};
constexpr Int8Table kInt8Table;

// Whether loaded elements exceed the true ones by 1/2, which their sums have to be rid of.
template <typename T>
constexpr bool kExceedsByHalf = __is_same(T, Int8);

template <typename T>
  requires(sizeof(T) == 1)
class DotLoader<T> {
 public:
  DotLoader() {
    const auto& table = []() -> const auto& {
      if constexpr (__is_same(T, Int8)) {
        return kInt8Table;
      } else {
        return kFloat8Table;
      }
    }();
    for (int i = 0; i < 2; ++i) {
      low_[i] = _mm512_load_si512(table.low + 64 * i);
      high_[i] = _mm512_load_si512(table.high + 64 * i);
    }
    // Or gcc inverts by vpternlog, which waits for what its target held before.
    asm("" : "+v"(ones_));
  }

  template <typename... Size>
  void operator()(const T* p, __m512i (&x)[2], Size... n) const {
    convert(load(p, n...), x[0], x[1]);
  }

  template <typename... Size>
  void pair(const T* p, const T* q, __m512i (&pairs)[4], Size... n) const {
    const __m512i a = load(p, n...), b = load(q, n...);
    convert(_mm512_unpacklo_epi8(a, b), pairs[0], pairs[1]);
    convert(_mm512_unpackhi_epi8(a, b), pairs[2], pairs[3]);
  }

 private:
  static __m512i load(const T* p) { return _mm512_loadu_si512(p); }
  static __m512i load(const T* p, int n) {
    const __mmask64 first = n >= kDotElements ? ~__mmask64{0} : (__mmask64{1} << n) - 1;
    return _mm512_maskz_loadu_epi8(first, p);
  }

  // The low and the high half of each 128 bits.
  void convert(__m512i bytes, __m512i& first, __m512i& second) const {
    __m512i place = bytes;               // its last seven bits are looked up
    if constexpr (__is_same(T, Int8)) {  // n or, below 0, -n - 1
      place = _mm512_min_epu8(bytes, _mm512_xor_si512(bytes, ones_));
    }
    const __m512i low = _mm512_permutex2var_epi8(low_[0], place, low_[1]);
    const __m512i magnitude = _mm512_permutex2var_epi8(high_[0], place, high_[1]);
    const __m512i sign = _mm512_set1_epi8(static_cast<char>(0x80));
    // magnitude | (bytes & sign)
    const __m512i high = _mm512_ternarylogic_epi32(magnitude, bytes, sign, 0xf8);
    first = _mm512_unpacklo_epi8(low, high);
    second = _mm512_unpackhi_epi8(low, high);
  }

  __m512i low_[2], high_[2], ones_ = _mm512_set1_epi8(-1);
};

// The kDotElements elements of a query at q, in the order in which those of a key are loaded.
inline void arrange(const BFloat16*, BFloat16*) {}
template <typename T>
  requires(sizeof(T) == 1)
inline void arrange(const T*, BFloat16* q) {
  const __m512i a = _mm512_loadu_si512(q), b = _mm512_loadu_si512(q + kHalfElements);
  const __m512i low = _mm512_setr_epi64(0, 1, 4, 5, 8, 9, 12, 13);
  const __m512i high = _mm512_setr_epi64(2, 3, 6, 7, 10, 11, 14, 15);
  _mm512_storeu_si512(q, _mm512_permutex2var_epi64(a, low, b));
  _mm512_storeu_si512(q + kHalfElements, _mm512_permutex2var_epi64(a, high, b));
}

// The kDotElements sums of values at x, from the order of pairs to the order of memory. A lane has
// 128 bits, four elements: lanes of vectors 2i and 2i + 1 alternate for bfloat16, lanes of all four
// vectors for 8 bits.
inline void restore_order(const BFloat16*, float* x) {
  const __m512i low = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
  const __m512i high = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
  for (int i = 0; i < kDotElements; i += 2 * kLanes) {
    const __m512i a = _mm512_loadu_si512(x + i), b = _mm512_loadu_si512(x + i + kLanes);
    _mm512_storeu_si512(x + i, _mm512_permutex2var_epi64(a, low, b));
    _mm512_storeu_si512(x + i + kLanes, _mm512_permutex2var_epi64(a, high, b));
  }
}
template <typename T>
  requires(sizeof(T) == 1)
inline void restore_order(const T*, float* x) {
  alignas(64) float moved[kDotElements];
  for (int lane = 0; lane < 4; ++lane) {
    for (int i = 0; i < 4; ++i) {
      _mm_store_ps(moved + (4 * lane + i) * 4, _mm_loadu_ps(x + (4 * i + lane) * 4));
    }
  }
  __builtin_memcpy(x, moved, sizeof(moved));
}

// Calls body(d, load) for pieces of kDotElements of a row; the last one loads what is left of it.
template <typename T, typename Body>
inline void for_pieces(int64_t head_dim, const DotLoader<T>& loader, const Body& body) {
  int64_t d = 0;
  for (; d + kDotElements <= head_dim; d += kDotElements) body(d, loader);
  if (d == head_dim) return;
  const int rest = static_cast<int>(head_dim - d);
  body(d, [&](const T* p, __m512i(&x)[2]) { loader(p, x, rest); });
}

}  // namespace
}  // namespace tree_attention::cpu
