// SPDX-License-Identifier: BSD-3-Clause
//
// Vectors of AVX-512 F, BW, VL, DQ. The interface is that of simd_portable.h.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "common/dtype.h"

namespace tree_attention::cpu {
namespace {

constexpr int kLanes = 16;
constexpr int kRowBlock = 4, kKeyBlock = 4;

using Vec = __m512;

inline Vec zero() { return _mm512_setzero_ps(); }
inline Vec broadcast(float x) { return _mm512_set1_ps(x); }
inline Vec load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, Vec x) { _mm512_storeu_ps(p, x); }
inline Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
inline Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
inline Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
inline Vec max_keep_nan(Vec bound, Vec x) { return _mm512_max_ps(bound, x); }
inline Vec min_keep_nan(Vec bound, Vec x) { return _mm512_min_ps(bound, x); }
inline Vec round(Vec x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT); }
// 0 from n = -127 on, like the other instruction sets, not a subnormal: a score of -inf weighs
// nothing.
inline Vec scale_by_exponent(Vec x, Vec n) {
  const __mmask16 normal = _mm512_cmp_ps_mask(n, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
  return _mm512_maskz_scalef_ps(normal, x, n);
}
inline Vec select_below(Vec x, float bound, Vec a, Vec b) {
  const __mmask16 below = _mm512_cmp_ps_mask(x, _mm512_set1_ps(bound), _CMP_LT_OQ);
  return _mm512_mask_blend_ps(below, b, a);
}
inline Vec abs(Vec x) { return _mm512_abs_ps(x); }
inline float reduce_add(Vec x) { return _mm512_reduce_add_ps(x); }

inline float reduce_max(Vec x) { return _mm512_reduce_max_ps(x); }

inline void load_pair(const float* p, Vec& a, Vec& b) {
  a = _mm512_loadu_ps(p);
  b = _mm512_loadu_ps(p + kLanes);
}
inline void load_pair(const Float16* p, Vec& a, Vec& b) {
  a = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  b = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p) + 1));
}
// Even elements to a, odd ones to b: a shift and a mask instead of two widenings.
inline void split_bfloat16(__m512i x, Vec& a, Vec& b) {
  a = _mm512_castsi512_ps(_mm512_slli_epi32(x, 16));
  b = _mm512_castsi512_ps(_mm512_and_si512(x, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
}
inline void load_pair(const BFloat16* p, Vec& a, Vec& b) {
  split_bfloat16(_mm512_loadu_si512(p), a, b);
}
inline void widen(const Int8*, __m256i x, Vec& a, Vec& b) {
  a = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_castsi256_si128(x)));
  b = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_extracti128_si256(x, 1)));
}
// As float16 of 2^-8 of the value. Its largest number would be the NaN.
inline void widen(const Float8*, __m256i x, Vec& a, Vec& b) {
  const __m512i bits = _mm512_slli_epi16(_mm512_cvtepu8_epi16(x), 8);
  const __m512i sign = _mm512_set1_epi16(static_cast<short>(0x8000));
  const __m512i magnitude = _mm512_srli_epi16(_mm512_andnot_si512(sign, bits), 1);
  const __mmask32 nan = _mm512_cmpeq_epi16_mask(magnitude, _mm512_set1_epi16(0x3f80));
  const __m512i half =
      _mm512_or_si512(_mm512_mask_mov_epi16(magnitude, nan, _mm512_set1_epi16(0x7e00)),
                      _mm512_and_si512(sign, bits));
  const Vec factor = _mm512_set1_ps(256.0f);
  a = _mm512_mul_ps(_mm512_cvtph_ps(_mm512_castsi512_si256(half)), factor);
  b = _mm512_mul_ps(_mm512_cvtph_ps(_mm512_extracti64x4_epi64(half, 1)), factor);
}
template <typename T>
  requires(sizeof(T) == 1)
inline void load_pair(const T* p, Vec& a, Vec& b) {
  widen(p, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), a, b);
}

// The numbers of a block of ExpertParams::kPacked, by a table of 16 that is looked up by four bits
// of an index alone.
inline void unpack(const uint8_t* p, Vec (&values)[4]) {
  const Vec table = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
  for (int i = 0; i < 2; ++i) {
    const __m512i bytes =
        _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p) + i));
    values[i] = _mm512_permutexvar_ps(bytes, table);
    values[2 + i] = _mm512_permutexvar_ps(_mm512_srli_epi32(bytes, 4), table);
  }
}

inline __mmask16 first_lanes(int n) {
  return static_cast<__mmask16>(n <= 0 ? 0 : n >= kLanes ? 0xffff : (1 << n) - 1);
}
inline void load_pair(const float* p, int n, Vec& a, Vec& b) {
  a = _mm512_maskz_loadu_ps(first_lanes(n), p);
  b = _mm512_maskz_loadu_ps(first_lanes(n - kLanes), p + kLanes);
}
inline __m512i load_16_bit(const void* p, int n) {
  return _mm512_maskz_loadu_epi16(n >= 32 ? ~__mmask32{0} : (__mmask32{1} << n) - 1, p);
}
inline void load_pair(const Float16* p, int n, Vec& a, Vec& b) {
  const __m512i x = load_16_bit(p, n);
  a = _mm512_cvtph_ps(_mm512_castsi512_si256(x));
  b = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(x, 1));
}
inline void load_pair(const BFloat16* p, int n, Vec& a, Vec& b) {
  split_bfloat16(load_16_bit(p, n), a, b);
}
template <typename T>
  requires(sizeof(T) == 1)
inline void load_pair(const T* p, int n, Vec& a, Vec& b) {
  const __mmask32 first = n >= 32 ? ~__mmask32{0} : (__mmask32{1} << n) - 1;
  widen(p, _mm256_maskz_loadu_epi8(first, p), a, b);
}

inline void to_memory_order(const void*, Vec&, Vec&) {}
inline void to_memory_order(const BFloat16*, Vec& a, Vec& b) {
  const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const __m512i high =
      _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
  const Vec even = a, odd = b;
  a = _mm512_permutex2var_ps(even, low, odd);
  b = _mm512_permutex2var_ps(even, high, odd);
}

inline void store_rounded(float* p, Vec x) { _mm512_storeu_ps(p, x); }
inline void store_rounded(Float16* p, Vec x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
inline void store_rounded(BFloat16* p, Vec x) {
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  rounded = _mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7fc00000));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
}

inline Vec add_halves(Vec a, Vec b) {
  return add(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
}
// out[row * stride + key] = sum of the lanes of sums[row][key].
template <int kRows>
inline void store_sums(const Vec (&sums)[kRows][kKeyBlock], float* out, int stride) {
  for (int row = 0; row < kRows; ++row) {
    const Vec ab = add_halves(sums[row][0], sums[row][1]);
    const Vec cd = add_halves(sums[row][2], sums[row][3]);
    const Vec quarters = add(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
    const __m256 halves =
        _mm256_add_ps(_mm512_castps512_ps256(quarters), _mm512_extractf32x8_ps(quarters, 1));
    _mm_storeu_ps(out + row * stride,
                  _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1)));
  }
}

}  // namespace
}  // namespace tree_attention::cpu
