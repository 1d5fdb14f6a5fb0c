// SPDX-License-Identifier: BSD-3-Clause
//
// Vectors of the compilers' vector extension, for any machine. A pair is 2 * kLanes consecutive
// elements of a row of K, V or Q, widened in the order that costs least: which element is in which
// lane is the same for Q and K, and to_memory_order undoes it for V.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "common/dtype.h"

namespace tree_attention::cpu {
namespace {

constexpr int kLanes = 4;
constexpr int kRowBlock = 4, kKeyBlock = 2;

using Vec = float __attribute__((vector_size(16)));
using IntVec = int32_t __attribute__((vector_size(16)));
using UintVec = uint32_t __attribute__((vector_size(16)));
using HalfVec = uint16_t __attribute__((vector_size(8)));

inline Vec zero() { return Vec{}; }
inline Vec broadcast(float x) { return Vec{x, x, x, x}; }
inline Vec load(const float* p) {
  Vec x;
  std::memcpy(&x, p, sizeof(x));
  return x;
}
inline void store(float* p, Vec x) { std::memcpy(p, &x, sizeof(x)); }
inline Vec add(Vec a, Vec b) { return a + b; }
inline Vec sub(Vec a, Vec b) { return a - b; }
inline Vec mul(Vec a, Vec b) { return a * b; }
inline Vec div(Vec a, Vec b) { return a / b; }
inline Vec fma(Vec a, Vec b, Vec c) {
#if defined(__ARM_FEATURE_FMA)
  return Vec{__builtin_fmaf(a[0], b[0], c[0]), __builtin_fmaf(a[1], b[1], c[1]),
             __builtin_fmaf(a[2], b[2], c[2]), __builtin_fmaf(a[3], b[3], c[3])};
#else
  return a * b + c;  // no instruction for it: rounded twice
#endif
}
// The larger (smaller) of two; a NaN in x is kept.
inline Vec max_keep_nan(Vec bound, Vec x) { return bound > x ? bound : x; }
inline Vec min_keep_nan(Vec bound, Vec x) { return bound < x ? bound : x; }
// Rounds to the nearest integer; |x| < 2^22.
inline Vec round(Vec x) {
  const Vec magic = broadcast(12582912.0f);  // 1.5 * 2^23
  return (x + magic) - magic;
}
// x * 2^n for integers n >= -127, where -127 gives 0.
inline Vec scale_by_exponent(Vec x, Vec n) {
  const UintVec exponent = reinterpret_cast<UintVec>(__builtin_convertvector(n, IntVec)) + 127u;
  return x * reinterpret_cast<Vec>(exponent << 23);
}
inline Vec select_below(Vec x, float bound, Vec a, Vec b) { return x < broadcast(bound) ? a : b; }
inline Vec abs(Vec x) { return reinterpret_cast<Vec>(reinterpret_cast<UintVec>(x) & 0x7fffffffu); }
inline float reduce_add(Vec x) { return (x[0] + x[2]) + (x[1] + x[3]); }
// The largest lane; a NaN among the lanes may be lost.
inline float reduce_max(Vec x) {
  const float low = x[0] > x[2] ? x[0] : x[2], high = x[1] > x[3] ? x[1] : x[3];
  return low > high ? low : high;
}

inline UintVec load_16_bit(const void* p) {
  HalfVec bits;
  std::memcpy(&bits, p, sizeof(bits));
  return __builtin_convertvector(bits, UintVec);
}
inline Vec widen(const BFloat16* p) { return reinterpret_cast<Vec>(load_16_bit(p) << 16); }
// Shifting exponent and mantissa into place leaves a factor of 2^(127 - 15), also on subnormals.
inline Vec widen(const Float16* p) {
  const UintVec bits = load_16_bit(p);
  const UintVec magnitude = (bits & 0x7fffu) << 13;
  const Vec scaled = reinterpret_cast<Vec>(magnitude) * broadcast(0x1p112f);
  const UintVec special = reinterpret_cast<UintVec>(magnitude >= (0x7c00u << 13)) & 0x7f800000u;
  return reinterpret_cast<Vec>(reinterpret_cast<UintVec>(scaled) | special |
                               ((bits & 0x8000u) << 16));
}
inline Vec widen(const float* p) { return load(p); }
inline Vec widen(const Int8* p) {
  return Vec{static_cast<float>(p[0].value), static_cast<float>(p[1].value),
             static_cast<float>(p[2].value), static_cast<float>(p[3].value)};
}
// Likewise, with a factor of 2^(127 - 7).
inline Vec widen(const Float8* p) {
  const UintVec bits{p[0].bits, p[1].bits, p[2].bits, p[3].bits};
  const UintVec magnitude = (bits & 0x7fu) << 20;
  const Vec scaled = reinterpret_cast<Vec>(magnitude) * broadcast(0x1p120f);
  const UintVec nan = reinterpret_cast<UintVec>(magnitude == (0x7fu << 20)) & 0x7fc00000u;
  return reinterpret_cast<Vec>(reinterpret_cast<UintVec>(scaled) | nan | ((bits & 0x80u) << 24));
}

template <typename T>
inline void load_pair(const T* p, Vec& a, Vec& b) {
  a = widen(p);
  b = widen(p + kLanes);
}
// The first n elements of a pair, then zeros.
template <typename T>
inline void load_pair(const T* p, int n, Vec& a, Vec& b) {
  T padded[2 * kLanes] = {};
  std::memcpy(padded, p, n * sizeof(T));
  load_pair(padded, a, b);
}
inline void to_memory_order(const void*, Vec&, Vec&) {}

inline void store_rounded(float* p, Vec x) { store(p, x); }
inline void store_rounded(BFloat16* p, Vec x) {
  const UintVec bits = reinterpret_cast<UintVec>(x);
  const UintVec rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  const UintVec kept = x == x ? rounded : UintVec{} + 0x7fc00000u;
  const HalfVec high = __builtin_convertvector(kept >> 16, HalfVec);
  std::memcpy(p, &high, sizeof(high));
}
inline uint16_t round_to_float16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  const uint32_t sign = bits >> 16 & 0x8000u;
  bits &= 0x7fffffffu;
  if (bits > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
  if (bits >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // rounds to 65536
  if (bits < 0x38800000u) {  // subnormal: adding 0.5 leaves units of 2^-24 in the low bits
    float magnitude;
    std::memcpy(&magnitude, &bits, sizeof(bits));
    magnitude += 0.5f;
    std::memcpy(&bits, &magnitude, sizeof(bits));
    return static_cast<uint16_t>(sign | (bits - 0x3f000000u));
  }
  const uint32_t rounded = bits + 0xfffu + (bits >> 13 & 1u);
  return static_cast<uint16_t>(sign | ((rounded - (112u << 23)) >> 13));
}
inline void store_rounded(Float16* p, Vec x) {
  for (int i = 0; i < kLanes; ++i) p[i].bits = round_to_float16(x[i]);
}

// out[row * stride + key] = sum of the lanes of sums[row][key].
template <int kRows>
inline void store_sums(const Vec (&sums)[kRows][kKeyBlock], float* out, int stride) {
  for (int row = 0; row < kRows; ++row) {
    for (int key = 0; key < kKeyBlock; ++key) {
      out[row * stride + key] = reduce_add(sums[row][key]);
    }
  }
}

}  // namespace
}  // namespace tree_attention::cpu
