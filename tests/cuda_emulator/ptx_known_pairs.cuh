// SPDX-License-Identifier: BSD-3-Clause
//
// Known answers of the functions of csrc/cuda/ptx.h of which keys and values of 8 bits become pairs
// of float16.
#pragma once

#include <cstdint>
#include <iterator>
#include <vector>

#include "known_answers_device.h"

namespace tree_attention::testing {

struct PairParams {
  const uint32_t* in;  // [32, 3]: pairs
  uint32_t* fma;       // [32]
  uint32_t* add;       // of the first and the third
  uint32_t* bytes;     // likewise
  uint32_t* swapped;   // the halves of the first
};
template <typename Params>
__global__ void pair_kernel(const Params p) {
  const uint32_t* in = p.in + 3 * threadIdx.x;
  p.fma[threadIdx.x] = cuda::fma_f16x2(in[0], in[1], in[2]);
  p.add[threadIdx.x] = cuda::add_f16x2(in[0], in[2]);
  p.bytes[threadIdx.x] = cuda::prmt<0x2704>(in[0], in[2]);
  uint16_t halves[2];
  cuda::mov_halves(halves, in[0]);
  p.swapped[threadIdx.x] = uint32_t{halves[0]} << 16 | halves[1];
}

inline void test_pairs(const Device& device) {
  const struct {
    uint16_t a, b, c, fma, add;
  } answers[] = {
      {0x8000, 0x4000, 0x8000, 0x8000, 0x8000},
      {0x0000, 0x4000, 0x8000, 0x0000, 0x0000},
      {0x3c00, 0x4000, 0x4200, 0x4500, 0x4400},  // 1 * 2 + 3, 1 + 3
      {0x64ff, 0x3c00, 0xe480, 0x57f0, 0x57f0},  // 1279 - 1152
      {0x6400, 0x3c00, 0xe480, 0xd800, 0xd800},  // 1024 - 1152
      {0x3c00, 0x3c00, 0x1000, 0x3c00, 0x3c00},  // half way, to even
      {0x3c01, 0x3c00, 0x1000, 0x3c02, 0x3c02},
      {0x3c03, 0x3c03, 0xbc00, 0x1e02, 0x1a00},  // the product is not rounded
      {0x0080, 0x5c00, 0x8000, 0x1800, 0x0080},  // subnormal times 2^8
      {0x0001, 0x3c00, 0x0001, 0x0002, 0x0002},
      {0x5f00, 0x5860, 0x8000, 0x7ba8, 0x5f00},  // 448 * 140
      {0x5f80, 0x5860, 0x8000, 0x7c00, 0x5f80},  // 480 * 140
      {0x7c00, 0x0000, 0x3c00, 0x7fff, 0x7c00},
      {0x7c00, 0x3c00, 0xfc00, 0x7fff, 0x7fff},
  };
  const size_t n = std::size(answers);
  const auto upper = [n](size_t i) { return (i + 1) % n; };  // whose answer is in the upper half
  std::vector<uint32_t> in(32 * 3);
  for (size_t i = 0; i < n; ++i) {
    const auto &low = answers[i], &high = answers[upper(i)];
    in[3 * i] = uint32_t{high.a} << 16 | low.a;
    in[3 * i + 1] = uint32_t{high.b} << 16 | low.b;
    in[3 * i + 2] = uint32_t{high.c} << 16 | low.c;
  }
  uint32_t* fma = device.array(std::vector<uint32_t>(32));
  uint32_t* add = device.array(std::vector<uint32_t>(32));
  uint32_t* bytes = device.array(std::vector<uint32_t>(32));
  uint32_t* swapped = device.array(std::vector<uint32_t>(32));
  device.run(pair_kernel<PairParams>, 1, 32, 0,
             PairParams{device.array(in), fma, add, bytes, swapped});
  for (size_t i = 0; i < n; ++i) {
    const auto &low = answers[i], &high = answers[upper(i)];
    CHECK(fma[i] == (uint32_t{high.fma} << 16 | low.fma), "fma of ", i, ": ", std::hex, fma[i]);
    CHECK(add[i] == (uint32_t{high.add} << 16 | low.add), "add of ", i, ": ", std::hex, add[i]);
    const uint32_t permuted =
        (low.c & 0xffu) | (low.a & 0xffu) << 8 | (high.c & 0xff00u) << 8 | (high.a & 0xffu) << 24;
    CHECK(bytes[i] == permuted, "bytes of ", i, ": ", std::hex, bytes[i]);
    CHECK(swapped[i] == (uint32_t{low.a} << 16 | high.a), "halves of ", i, ": ", std::hex,
          swapped[i]);
  }
}

// Every byte as a float8, beside the one below it.
struct Float8Params {
  uint32_t* out;  // [256]
};
template <typename Params>
__global__ void float8_kernel(const Params p) {
  if constexpr (cuda::kConvertsFloat8) {
    for (unsigned i = threadIdx.x; i < 256; i += 32) {
      p.out[i] = cuda::cvt_f16x2_e4m3x2(static_cast<uint16_t>(i << 8 | (i + 255) % 256));
    }
  }
}

// The bits of float16 for a float8 without a sign that is not NaN.
inline uint32_t float16_of_float8(uint32_t byte) {
  if (byte >= 8) return ((byte >> 3) + 8) << 10 | (byte & 7) << 7;
  uint32_t exponent = 9, digits = byte << 7;  // subnormal, but not in float16
  if (byte == 0) return 0;
  for (; digits < 1 << 10; digits *= 2) --exponent;
  return exponent << 10 | (digits & 1023);
}

inline void check_float8(const uint32_t* out) {
  for (uint32_t i = 0; i < 256; ++i) {
    const auto is_right = [](uint32_t bits, uint32_t byte) {
      const uint32_t magnitude = byte & 0x7f;
      if (magnitude == 0x7f) return (bits & 0x7fff) > 0x7c00;
      return bits == ((byte & 0x80) << 8 | float16_of_float8(magnitude));
    };
    CHECK(is_right(out[i] >> 16, i) && is_right(out[i] & 0xffff, (i + 255) % 256), "float8 ", i,
          ": ", std::hex, out[i]);
  }
}

inline void test_float8(const Device& device) {
  uint32_t* out = device.array(std::vector<uint32_t>(256, 1));
  device.run(float8_kernel<Float8Params>, 1, 32, 0, Float8Params{out});
  if (out[0] != 1) check_float8(out);  // the device has the instruction
}

}  // namespace tree_attention::testing
