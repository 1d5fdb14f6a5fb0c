// SPDX-License-Identifier: BSD-3-Clause
//
// Elements of 8 bits to elements of 16, without an error: four bytes of a register become the pairs
// (byte 0, byte 2) and (byte 1, byte 3). Conversion instructions for float8 exist from compute
// capability 8.9 on; this is arithmetic of pairs that 8.0 has.
#pragma once

#include <type_traits>

#include "cuda/element.cuh"

namespace tree_attention::cuda {

// The bits of a pair of the same element.
TREE_ATTENTION_HOST_DEVICE constexpr uint32_t both(uint32_t element) {
  return element << 16 | element;
}

// a b + c of pairs, rounded to nearest even.
template <typename Element>
__device__ __forceinline__ uint32_t fma_pairs(uint32_t a, uint32_t b, uint32_t c);

template <>
__device__ __forceinline__ uint32_t fma_pairs<BFloat16>(uint32_t a, uint32_t b, uint32_t c) {
  return fma_bf16x2(a, b, c);
}
template <>
__device__ __forceinline__ uint32_t fma_pairs<Float16>(uint32_t a, uint32_t b, uint32_t c) {
  return fma_f16x2(a, b, c);
}

// Bytes 0 and 2 of `bytes`, whose other bytes may be anything.
template <typename Element, typename Cached>
struct Widen;

// bfloat16 has seven bits after the point. With 0x4300 above them the low seven bits of a byte x
// are 128 + (x & 127), and with the sign, bit 7, in the exponent's last place the number is 128 or
// 256. x is the difference.
template <>
struct Widen<BFloat16, Int8> {
  static __device__ __forceinline__ uint32_t pair(uint32_t bytes) {
    const uint32_t low = (bytes & both(0x7f)) | both(0x4300);
    const uint32_t sign = (bytes & both(0x80)) | both(0x4300);
    return fma_bf16x2(sign, both(0xbf80), low);  // 0xbf80: -1
  }
};

// float16 has ten: 0x6400 above x + 128 is 1024 + x + 128.
template <>
struct Widen<Float16, Int8> {
  static __device__ __forceinline__ uint32_t pair(uint32_t bytes) {
    const uint32_t shifted = ((bytes ^ both(0x80)) & both(0xff)) | both(0x6400);
    return fma_f16x2(shifted, both(0x3c00), both(0xe480));  // times 1, minus 1152
  }
};

// The bits of a float8 without its sign, moved to where Element has the end of its exponent, are
// the number times a power of two, subnormal numbers as well. Only 0x7f, the NaN, would be a
// number: 480, and times kBeyond it, unlike 448, is infinite; zero times infinity is NaN.
template <typename Element>
struct Widen<Element, Float8> {
  static constexpr bool kIsBFloat16 = std::is_same_v<Element, BFloat16>;
  static constexpr int kShift = kIsBFloat16 ? 4 : 1;  // to the right, from the upper byte
  static constexpr uint32_t kUnit = both(kIsBFloat16 ? 0x7b80 : 0x5c00);    // 2^120; 2^8
  static constexpr uint32_t kBeyond = both(kIsBFloat16 ? 0x7b10 : 0x5860);  // 1.125 2^119; 140
  static constexpr uint32_t kMagnitude = both(0x7f00 >> kShift), kSign = both(0x8000);

  static __device__ __forceinline__ uint32_t pair(uint32_t bytes) {
    const uint32_t upper = bytes << 8;
    const uint32_t moved = (upper >> kShift & kMagnitude) | (upper & kSign);
    const uint32_t number = fma_pairs<Element>(moved, kUnit, kSign);
    const uint32_t beyond = fma_pairs<Element>(number, kBeyond, kSign);
    return fma_pairs<Element>(beyond, 0, number);
  }
};

template <typename Element, typename Cached>
__device__ __forceinline__ void widen(uint32_t bytes, uint32_t (&pairs)[2]) {
  using Pair = Widen<Element, Cached>;
  pairs[0] = Pair::pair(bytes);
  pairs[1] = Pair::pair(bytes >> 8);
}

}  // namespace tree_attention::cuda
