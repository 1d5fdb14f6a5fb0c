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

// The first (last) half of a, and then of b.
inline uint16x8_t first_halves(uint16x8_t a, uint16x8_t b) {
  return vreinterpretq_u16_u64(vzip1q_u64(vreinterpretq_u64_u16(a), vreinterpretq_u64_u16(b)));
}
inline uint16x8_t last_halves(uint16x8_t a, uint16x8_t b) {
  return vreinterpretq_u16_u64(vzip2q_u64(vreinterpretq_u64_u16(a), vreinterpretq_u64_u16(b)));
}
inline Vec first_halves(Vec a, Vec b) {
  return vreinterpretq_f32_u16(first_halves(vreinterpretq_u16_f32(a), vreinterpretq_u16_f32(b)));
}
inline Vec last_halves(Vec a, Vec b) {
  return vreinterpretq_f32_u16(last_halves(vreinterpretq_u16_f32(a), vreinterpretq_u16_f32(b)));
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

// Loads pieces of rows, also as operands of products.
template <typename T>
class PieceLoader {
 public:
  void load(const T* p, uint16x8_t (&x)[2]) const {
    if constexpr (__is_same(T, BFloat16)) {
      x[0] = vld1q_u16(&p->bits);
      x[1] = vld1q_u16(&p[8].bits);
    } else if constexpr (__is_same(T, Int8)) {
      Vec wide[4];
      widen(vreinterpretq_u8_s8(vld1q_s8(&p->value)), wide);
      for (int i = 0; i < 2; ++i) x[i] = round(wide[2 * i], wide[2 * i + 1]);
    } else {
      look_up(vld1q_u8(&p->bits), x);
    }
  }

  // x [4] of [2 keys, 4 dims]
  void load_keys(const T* a, const T* b, uint16x8_t (&x)[4]) const {
    if constexpr (__is_same(T, Int8)) {
      Vec wide_a[4], wide_b[4];
      widen(vreinterpretq_u8_s8(vld1q_s8(&a->value)), wide_a);
      widen(vreinterpretq_u8_s8(vld1q_s8(&b->value)), wide_b);
      for (int i = 0; i < 4; ++i) x[i] = round(wide_a[i], wide_b[i]);
    } else {
      uint16x8_t of_a[2], of_b[2];
      load(a, of_a);
      load(b, of_b);
      for (int i = 0; i < 2; ++i) {
        x[2 * i] = first_halves(of_a[i], of_b[i]);
        x[2 * i + 1] = last_halves(of_a[i], of_b[i]);
      }
    }
  }

  // x [8] of [2 dims, 4 keys], of the values that begin at v[0 to 3] + d
  void load_values(const T* const* v, int64_t d, uint16x8_t (&x)[8]) const {
    if constexpr (__is_same(T, Int8)) {
      const auto bytes = [&](int i) { return vreinterpretq_u8_s8(vld1q_s8(&v[i][d].value)); };
      const uint8x16_t a = bytes(0), b = bytes(1), c = bytes(2), e = bytes(3);
      transpose(vreinterpretq_u16_u8(vzip1q_u8(a, b)), vreinterpretq_u16_u8(vzip1q_u8(c, e)), x);
      transpose(vreinterpretq_u16_u8(vzip2q_u8(a, b)), vreinterpretq_u16_u8(vzip2q_u8(c, e)),
                x + 4);
    } else {
      uint16x8_t of_key[4][2];
      for (int i = 0; i < 4; ++i) load(v[i] + d, of_key[i]);
      for (int i = 0; i < 2; ++i) {
        const uint16x8_t a = of_key[0][i], b = of_key[1][i], c = of_key[2][i], e = of_key[3][i];
        interleave(vzip1q_u16(a, b), vzip1q_u16(c, e), x + 4 * i);
        interleave(vzip2q_u16(a, b), vzip2q_u16(c, e), x + 4 * i + 2);
      }
    }
  }

 private:
  // x [2] of [2 dims, 4 keys] from pairs of keys
  static void interleave(uint16x8_t low, uint16x8_t high, uint16x8_t* x) {
    const uint32x4_t ab = vreinterpretq_u32_u16(low), cd = vreinterpretq_u32_u16(high);
    x[0] = vreinterpretq_u16_u32(vzip1q_u32(ab, cd));
    x[1] = vreinterpretq_u16_u32(vzip2q_u32(ab, cd));
  }
  // x [4] of [2 dims, 4 keys] from pairs of keys, as bytes
  void transpose(uint16x8_t ab, uint16x8_t cd, uint16x8_t* x) const {
    const uint16x8_t quads[2] = {vzip1q_u16(ab, cd), vzip2q_u16(ab, cd)};
    for (int i = 0; i < 2; ++i) {
      Vec of_dim[4];
      widen(vreinterpretq_u8_u16(quads[i]), of_dim);
      x[2 * i] = round(of_dim[0], of_dim[1]);
      x[2 * i + 1] = round(of_dim[2], of_dim[3]);
    }
  }

  // A table puts each byte above three zeros: an integer, 2^24 of the element.
  void widen(uint8x16_t bytes, Vec (&x)[4]) const {
    for (int i = 0; i < 4; ++i) {
      const uint8x16_t above = vqtbl1q_u8(bytes, above_zeros_[i]);
      x[i] = vcvtq_n_f32_s32(vreinterpretq_s32_u8(above), 24);
    }
  }
  // To bfloat16, in which they are exact.
  static uint16x8_t round(Vec a, Vec b) {
    return vuzp2q_u16(vreinterpretq_u16_f32(a), vreinterpretq_u16_f32(b));
  }

  // Exponent and fraction go where bfloat16 has its own; the exponents differ by 120, which is 0x3c
  // in the upper byte. Subnormals and the first of the others are looked up, and the one NaN is
  // found.
  void look_up(uint8x16_t bytes, uint16x8_t (&x)[2]) const {
    const uint8x16_t magnitude = vandq_u8(bytes, vdupq_n_u8(0x7f));
    const uint8x16_t low = vqtbx1q_u8(vshlq_n_u8(bytes, 4), low_, magnitude);
    uint8x16_t high = vsraq_n_u8(vdupq_n_u8(0x3c), magnitude, 4);
    high = vorrq_u8(vqtbx1q_u8(high, high_, magnitude), vceqq_u8(magnitude, vdupq_n_u8(0x7f)));
    high = vbslq_u8(vdupq_n_u8(0x80), bytes, high);
    x[0] = vreinterpretq_u16_u8(vzip1q_u8(low, high));
    x[1] = vreinterpretq_u16_u8(vzip2q_u8(low, high));
  }

  static uint8x16_t above_zeros(uint32_t first) {
    const uint32_t places[4] = {first << 24, (first + 1) << 24, (first + 2) << 24,
                                (first + 3) << 24};
    return vreinterpretq_u8_u32(vorrq_u32(vld1q_u32(places), vdupq_n_u32(0xffffff)));
  }

  const uint8x16_t low_ = vld1q_u8(kSmallFloat8Table.low), high_ = vld1q_u8(kSmallFloat8Table.high);
  const uint8x16_t above_zeros_[4] = {above_zeros(0), above_zeros(4), above_zeros(8),
                                      above_zeros(12)};
};

// PieceLoader of the first n elements of a piece.
template <typename T>
class PartialLoader {
 public:
  PartialLoader(const PieceLoader<T>& loader, int n) : loader_(loader), n_(n) {}

  void load(const T* p, uint16x8_t (&x)[2]) const { loader_.load(Piece(p, n_).x, x); }
  void load_keys(const T* a, const T* b, uint16x8_t (&x)[4]) const {
    loader_.load_keys(Piece(a, n_).x, Piece(b, n_).x, x);
  }
  void load_values(const T* const* v, int64_t d, uint16x8_t (&x)[8]) const {
    const Piece pieces[4] = {{v[0] + d, n_}, {v[1] + d, n_}, {v[2] + d, n_}, {v[3] + d, n_}};
    const T* const rows[4] = {pieces[0].x, pieces[1].x, pieces[2].x, pieces[3].x};
    loader_.load_values(rows, 0, x);
  }

 private:
  struct Piece {
    Piece(const T* p, int n) { std::memcpy(x, p, n * sizeof(T)); }
    T x[kPieceElements] = {};
  };

  const PieceLoader<T>& loader_;
  const int n_;
};

// Calls body(d, loader) for the pieces of a row, the last of which may be shorter.
template <typename T, typename Body>
__attribute__((always_inline)) inline void for_pieces(int64_t head_dim,
                                                      const PieceLoader<T>& loader,
                                                      const Body& body) {
  int64_t d = 0;
  for (; d + kPieceElements <= head_dim; d += kPieceElements) body(d, loader);
  if (d < head_dim) body(d, PartialLoader<T>(loader, static_cast<int>(head_dim - d)));
}

// sum [2 rows, 2] + a [2 rows, 4] times the transpose of b [2, 4], of bfloat16.
inline Vec multiply_add(Vec sum, uint16x8_t a, uint16x8_t b) {
  return vbfmmlaq_f32(sum, reinterpret_cast<bfloat16x8_t>(a), reinterpret_cast<bfloat16x8_t>(b));
}

}  // namespace
}  // namespace tree_attention::cpu
