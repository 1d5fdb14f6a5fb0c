// SPDX-License-Identifier: BSD-3-Clause
//
// Vectors of AVX2, FMA, F16C. The interface is that of simd_portable.h.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "common/dtype.h"

namespace tree_attention::cpu {
namespace {

constexpr int kLanes = 8;
constexpr int kRowBlock = 4, kKeyBlock = 2;

using Vec = __m256;

inline Vec zero() { return _mm256_setzero_ps(); }
inline Vec broadcast(float x) { return _mm256_set1_ps(x); }
inline Vec load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, Vec x) { _mm256_storeu_ps(p, x); }
inline Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
inline Vec sub(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
inline Vec div(Vec a, Vec b) { return _mm256_div_ps(a, b); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
inline Vec max_keep_nan(Vec bound, Vec x) { return _mm256_max_ps(bound, x); }
inline Vec min_keep_nan(Vec bound, Vec x) { return _mm256_min_ps(bound, x); }
inline Vec round(Vec x) {
  return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
inline Vec scale_by_exponent(Vec x, Vec n) {
  const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
  return _mm256_mul_ps(x, _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23)));
}
inline Vec select_below(Vec x, float bound, Vec a, Vec b) {
  return _mm256_blendv_ps(b, a, _mm256_cmp_ps(x, _mm256_set1_ps(bound), _CMP_LT_OQ));
}
inline Vec abs(Vec x) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x); }
inline float reduce_add(Vec x) {
  __m128 sum = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
  return _mm_cvtss_f32(_mm_add_ss(sum, _mm_movehdup_ps(sum)));
}

inline float reduce_max(Vec x) {
  __m128 max = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  max = _mm_max_ps(max, _mm_movehl_ps(max, max));
  return _mm_cvtss_f32(_mm_max_ss(max, _mm_movehdup_ps(max)));
}

inline void load_pair(const float* p, Vec& a, Vec& b) {
  a = _mm256_loadu_ps(p);
  b = _mm256_loadu_ps(p + kLanes);
}
inline void load_pair(const Float16* p, Vec& a, Vec& b) {
  a = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  b = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p) + 1));
}
// Even elements to a, odd ones to b: a shift and a mask instead of two widenings.
inline void load_pair(const BFloat16* p, Vec& a, Vec& b) {
  const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  a = _mm256_castsi256_ps(_mm256_slli_epi32(x, 16));
  b = _mm256_castsi256_ps(_mm256_and_si256(x, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
}
inline void load_pair(const Int8* p, Vec& a, Vec& b) {
  const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  a = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(x));
  b = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_unpackhi_epi64(x, x)));
}
// As float16 of 2^-8 of the value. Its largest number would be the NaN.
inline void load_pair(const Float8* p, Vec& a, Vec& b) {
  const __m256i x =
      _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  const __m256i high_bytes =
      _mm256_setr_epi8(-1, 0, -1, 1, -1, 2, -1, 3, -1, 4, -1, 5, -1, 6, -1, 7,  //
                       -1, 8, -1, 9, -1, 10, -1, 11, -1, 12, -1, 13, -1, 14, -1, 15);
  // The sign, a zero, and exponent and mantissa.
  const __m256i number = _mm256_and_si256(_mm256_srai_epi16(_mm256_shuffle_epi8(x, high_bytes), 1),
                                          _mm256_set1_epi16(static_cast<short>(0xbfff)));
  // One more in the mantissa carries into the zero only where the number is the NaN.
  const __m256i nan = _mm256_and_si256(_mm256_add_epi16(number, _mm256_set1_epi16(0x80)),
                                       _mm256_set1_epi16(0x4000));
  const __m256i half = _mm256_or_si256(number, nan);
  const Vec factor = _mm256_set1_ps(256.0f);
  a = _mm256_mul_ps(_mm256_cvtph_ps(_mm256_castsi256_si128(half)), factor);
  b = _mm256_mul_ps(_mm256_cvtph_ps(_mm256_extracti128_si256(half, 1)), factor);
}
template <typename T>
inline void load_pair(const T* p, int n, Vec& a, Vec& b) {
  T padded[2 * kLanes] = {};
  std::memcpy(padded, p, n * sizeof(T));
  load_pair(padded, a, b);
}

inline void to_memory_order(const void*, Vec&, Vec&) {}
inline void to_memory_order(const BFloat16*, Vec& a, Vec& b) {
  const Vec low = _mm256_unpacklo_ps(a, b), high = _mm256_unpackhi_ps(a, b);
  a = _mm256_permute2f128_ps(low, high, 0x20);
  b = _mm256_permute2f128_ps(low, high, 0x31);
}

inline void store_rounded(float* p, Vec x) { _mm256_storeu_ps(p, x); }
inline void store_rounded(Float16* p, Vec x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                   _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
inline void store_rounded(BFloat16* p, Vec x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  rounded = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc00000),
                               _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)));
  rounded = _mm256_srli_epi32(rounded, 16);
  rounded = _mm256_permute4x64_epi64(_mm256_packus_epi32(rounded, rounded), 0xd8);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(rounded));
}

// out[row * stride + key] = sum of the lanes of sums[row][key].
template <int kRows>
inline void store_sums(const Vec (&sums)[kRows][kKeyBlock], float* out, int stride) {
  for (int row = 0; row < kRows; ++row) {
    const Vec pairs = _mm256_hadd_ps(sums[row][0], sums[row][1]);
    __m128 sum = _mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps(pairs, 1));
    sum = _mm_hadd_ps(sum, sum);
    _mm_storel_pi(reinterpret_cast<__m64*>(out + row * stride), sum);
  }
}

}  // namespace
}  // namespace tree_attention::cpu
