// SPDX-License-Identifier: BSD-3-Clause
//
// Rows of bfloat16, or of 8 bits, which are exact in it, as bfloat16.
#pragma once

#include <arm_neon.h>

#include <cstdint>
#include <cstring>

#include "common/dtype.h"
#include "cpu/vector/keys.h"
#include "cpu/vector/simd.h"

namespace tree_attention::cpu {
namespace {

// Elements of a row that are taken at a time, as two vectors in the order of memory.
constexpr int kPieceElements = 16;

inline int64_t padded_to_pieces(int64_t head_dim) {
  return (head_dim + kPieceElements - 1) / kPieceElements * kPieceElements;
}

// The upper halves of the elements of four vectors.
inline void upper_halves(const Vec (&wide)[4], uint16x8_t (&x)[2]) {
  for (int i = 0; i < 2; ++i) {
    x[i] = vuzp2q_u16(vreinterpretq_u16_f32(wide[2 * i]), vreinterpretq_u16_f32(wide[2 * i + 1]));
  }
}

// The bytes of the bfloat16 of every float8 below 16 steps of a subnormal.
struct SmallFloat8Table {
  alignas(16) uint8_t low[16] = {}, high[16] = {};

  constexpr SmallFloat8Table() {
    for (int i = 0; i < 16; ++i) {
      const auto bits = __builtin_bit_cast(uint32_t, static_cast<float>(i) * 0x1p-9f);
      low[i] = static_cast<uint8_t>(bits >> 16);
      high[i] = static_cast<uint8_t>(bits >> 24);
    }
  }
};
constexpr SmallFloat8Table kSmallFloat8Table;

// Loads a piece of a row, or its first n elements.
template <typename T>
class PieceLoader {
 public:
  void operator()(const T* p, uint16x8_t (&x)[2]) const {
    if constexpr (__is_same(T, BFloat16)) {
      x[0] = vld1q_u16(&p->bits);
      x[1] = vld1q_u16(&p[8].bits);
    } else if constexpr (__is_same(T, Int8)) {
      widen(vld1q_s8(&p->value), x);
    } else {
      look_up(vld1q_u8(&p->bits), x);
    }
  }
  void operator()(const T* p, int n, uint16x8_t (&x)[2]) const {
    T piece[kPieceElements] = {};
    std::memcpy(piece, p, n * sizeof(T));
    (*this)(piece, x);
  }

 private:
  static void widen(int8x16_t bytes, uint16x8_t (&x)[2]) {
    const int16x8_t low = vmovl_s8(vget_low_s8(bytes)), high = vmovl_high_s8(bytes);
    const Vec wide[4] = {
        vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))), vcvtq_f32_s32(vmovl_high_s16(low)),
        vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))), vcvtq_f32_s32(vmovl_high_s16(high))};
    upper_halves(wide, x);
  }

  // Exponent and fraction go where those of bfloat16 are; the difference of 120 of the exponents is
  // 0x3c in the upper byte. Subnormals and the first of the others are looked up, and the one NaN
  // is found.
  void look_up(uint8x16_t bytes, uint16x8_t (&x)[2]) const {
    const uint8x16_t magnitude = vandq_u8(bytes, vdupq_n_u8(0x7f));
    const uint8x16_t low = vqtbx1q_u8(vshlq_n_u8(bytes, 4), low_, magnitude);
    uint8x16_t high = vsraq_n_u8(vdupq_n_u8(0x3c), magnitude, 4);
    high = vorrq_u8(vqtbx1q_u8(high, high_, magnitude), vceqq_u8(magnitude, vdupq_n_u8(0x7f)));
    high = vbslq_u8(vdupq_n_u8(0x80), bytes, high);
    x[0] = vreinterpretq_u16_u8(vzip1q_u8(low, high));
    x[1] = vreinterpretq_u16_u8(vzip2q_u8(low, high));
  }

  const uint8x16_t low_ = vld1q_u8(kSmallFloat8Table.low), high_ = vld1q_u8(kSmallFloat8Table.high);
};

// Calls body(d, load) for the pieces of a row; the last one loads what is left of it.
template <typename T, typename Body>
inline void for_pieces(int64_t head_dim, const PieceLoader<T>& loader, const Body& body) {
  int64_t d = 0;
  for (; d + kPieceElements <= head_dim; d += kPieceElements) body(d, loader);
  if (d == head_dim) return;
  const int rest = static_cast<int>(head_dim - d);
  body(d, [&](const T* p, uint16x8_t(&x)[2]) { loader(p, rest, x); });
}

// sum [2 rows, 2] + a [2 rows, 4] times the transpose of b [2, 4], of bfloat16.
inline Vec multiply_add(Vec sum, uint16x8_t a, uint16x8_t b) {
  return vbfmmlaq_f32(sum, reinterpret_cast<bfloat16x8_t>(a), reinterpret_cast<bfloat16x8_t>(b));
}

// The first (last) four elements of a, then those of b.
inline uint16x8_t first_halves(uint16x8_t a, uint16x8_t b) {
  return vreinterpretq_u16_u64(vzip1q_u64(vreinterpretq_u64_u16(a), vreinterpretq_u64_u16(b)));
}
inline uint16x8_t last_halves(uint16x8_t a, uint16x8_t b) {
  return vreinterpretq_u16_u64(vzip2q_u64(vreinterpretq_u64_u16(a), vreinterpretq_u64_u16(b)));
}
// Likewise, of two elements of sums: the first (second) row of two sums beside each other.
inline Vec first_row(Vec a, Vec b) {
  return vreinterpretq_f32_f64(vzip1q_f64(vreinterpretq_f64_f32(a), vreinterpretq_f64_f32(b)));
}
inline Vec second_row(Vec a, Vec b) {
  return vreinterpretq_f32_f64(vzip2q_f64(vreinterpretq_f64_f32(a), vreinterpretq_f64_f32(b)));
}

}  // namespace
}  // namespace tree_attention::cpu
