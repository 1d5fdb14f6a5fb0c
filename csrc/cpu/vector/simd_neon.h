// SPDX-License-Identifier: BSD-3-Clause
//
// Vectors of NEON, as every AArch64 has it. The interface is that of simd_portable.h.
#pragma once

#include <arm_neon.h>

#include <cstdint>
#include <cstring>

#include "common/dtype.h"

namespace tree_attention::cpu {
namespace {

constexpr int kLanes = 4;
constexpr int kRowBlock = 4, kKeyBlock = 4;

using Vec = float32x4_t;

inline Vec zero() { return vdupq_n_f32(0.0f); }
inline Vec broadcast(float x) { return vdupq_n_f32(x); }
inline Vec load(const float* p) { return vld1q_f32(p); }
inline void store(float* p, Vec x) { vst1q_f32(p, x); }
inline Vec add(Vec a, Vec b) { return vaddq_f32(a, b); }
inline Vec sub(Vec a, Vec b) { return vsubq_f32(a, b); }
inline Vec mul(Vec a, Vec b) { return vmulq_f32(a, b); }
inline Vec div(Vec a, Vec b) { return vdivq_f32(a, b); }
inline Vec fma(Vec a, Vec b, Vec c) { return vfmaq_f32(c, a, b); }
// A NaN in the bound is kept as well.
inline Vec max_keep_nan(Vec bound, Vec x) { return vmaxq_f32(bound, x); }
inline Vec min_keep_nan(Vec bound, Vec x) { return vminq_f32(bound, x); }
inline Vec round(Vec x) { return vrndnq_f32(x); }
inline Vec scale_by_exponent(Vec x, Vec n) {
  const int32x4_t exponent = vaddq_s32(vcvtq_s32_f32(n), vdupq_n_s32(127));
  return vmulq_f32(x, vreinterpretq_f32_s32(vshlq_n_s32(exponent, 23)));
}
inline Vec select_below(Vec x, float bound, Vec a, Vec b) {
  return vbslq_f32(vcltq_f32(x, vdupq_n_f32(bound)), a, b);
}
inline Vec abs(Vec x) { return vabsq_f32(x); }
inline float reduce_add(Vec x) { return vaddvq_f32(x); }
inline float reduce_max(Vec x) { return vmaxnmvq_f32(x); }  // of the lanes that are numbers

inline void load_pair(const float* p, Vec& a, Vec& b) {
  a = vld1q_f32(p);
  b = vld1q_f32(p + kLanes);
}
inline void load_pair(const BFloat16* p, Vec& a, Vec& b) {
  const uint16x8_t x = vld1q_u16(&p->bits);
  a = vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(x), 16));
  b = vreinterpretq_f32_u32(vshll_high_n_u16(x, 16));
}
inline void widen_halves(uint16x8_t x, Vec& a, Vec& b) {
  const float16x8_t halves = vreinterpretq_f16_u16(x);
  a = vcvt_f32_f16(vget_low_f16(halves));
  b = vcvt_high_f32_f16(halves);
}
inline void load_pair(const Float16* p, Vec& a, Vec& b) { widen_halves(vld1q_u16(&p->bits), a, b); }
inline void load_pair(const Int8* p, Vec& a, Vec& b) {
  const int16x8_t x = vmovl_s8(vld1_s8(&p->value));
  a = vcvtq_f32_s32(vmovl_s16(vget_low_s16(x)));
  b = vcvtq_f32_s32(vmovl_high_s16(x));
}
// As float16 of 2^-8 of the value: the sign, at first twice, then exponent and fraction. Its
// largest number is the NaN, which it becomes by the exponent's highest bit, in place of the second
// sign.
inline void load_pair(const Float8* p, Vec& a, Vec& b) {
  const int8x8_t bytes = vreinterpret_s8_u8(vld1_u8(&p->bits));
  const uint16x8_t x = vreinterpretq_u16_s16(vshll_n_s8(bytes, 7));
  const uint16x8_t nan = vceqq_u16(vandq_u16(x, vdupq_n_u16(0x3fff)), vdupq_n_u16(0x3f80));
  widen_halves(vbslq_u16(vdupq_n_u16(0x4000), nan, x), a, b);
  a = vmulq_n_f32(a, 256.0f);
  b = vmulq_n_f32(b, 256.0f);
}
template <typename T>
inline void load_pair(const T* p, int n, Vec& a, Vec& b) {
  T padded[2 * kLanes] = {};
  std::memcpy(padded, p, n * sizeof(T));
  load_pair(padded, a, b);
}
inline void to_memory_order(const void*, Vec&, Vec&) {}

inline void store_rounded(float* p, Vec x) { vst1q_f32(p, x); }
inline void store_rounded(Float16* p, Vec x) {
  vst1_u16(&p->bits, vreinterpret_u16_f16(vcvt_f16_f32(x)));
}
inline void store_rounded(BFloat16* p, Vec x) {
  const uint32x4_t bits = vreinterpretq_u32_f32(x);
  const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
  const uint32x4_t rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
  const uint32x4_t kept = vbslq_u32(vceqq_f32(x, x), rounded, vdupq_n_u32(0x7fc00000));
  vst1_u16(&p->bits, vshrn_n_u32(kept, 16));
}

// The sums of the lanes of four vectors.
inline Vec sum_lanes(Vec a, Vec b, Vec c, Vec d) {
  return vpaddq_f32(vpaddq_f32(a, b), vpaddq_f32(c, d));
}
// out[row * stride + key] = sum of the lanes of sums[row][key]. Inlined, or gcc keeps the sums in
// memory.
template <int kRows>
__attribute__((always_inline)) inline void store_sums(const Vec (&sums)[kRows][kKeyBlock],
                                                      float* out, int stride) {
  for (int row = 0; row < kRows; ++row) {
    const Vec(&of_row)[kKeyBlock] = sums[row];
    vst1q_f32(out + row * stride, sum_lanes(of_row[0], of_row[1], of_row[2], of_row[3]));
  }
}

}  // namespace
}  // namespace tree_attention::cpu
