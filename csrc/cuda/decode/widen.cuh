// SPDX-License-Identifier: BSD-3-Clause
//
// Elements of 8 bits to pairs of float16, without an error: two of the four bytes of a register,
// byte kFirst in the lower half of the result.
#pragma once

#include "cuda/element.cuh"

namespace tree_attention::cuda {

// The bits of a pair of the same element.
TREE_ATTENTION_HOST_DEVICE constexpr uint32_t both(uint32_t element) {
  return element << 16 | element;
}

// `kConverts`: whether the device has an instruction that converts float8.
template <typename Cached, bool kConverts = kConvertsFloat8>
struct Widen;

// float16 has ten bits after the point: with 0x64 above it, the byte of x + 128 is 1024 + x + 128.
template <bool kConverts>
struct Widen<Int8, kConverts> {
  template <int kFirst, int kSecond>
  static __device__ __forceinline__ uint32_t pair(uint32_t bytes) {
    constexpr uint32_t kSelectors = 0x4040 | kSecond << 8 | kFirst;
    const uint32_t with_exponent = prmt<kSelectors>(bytes ^ 0x80808080, 0x64646464);
    return add_f16x2(with_exponent, both(0xe480));  // minus 1152
  }
};

template <>
struct Widen<Float8, true> {
  template <int kFirst, int kSecond>
  static __device__ __forceinline__ uint32_t pair(uint32_t bytes) {
    // One permutation for both pairs, or none.
    uint16_t halves[2];
    mov_halves(halves, kSecond == kFirst + 1 ? bytes : prmt<0x3120>(bytes, 0));
    return cvt_f16x2_e4m3x2(halves[kFirst == 0 ? 0 : 1]);
  }
};

// The bits of a float8 without its sign, moved to where float16 has the end of its exponent, are
// the number times 2^-8, subnormal numbers as well. Only 0x7f, the NaN, would be a number: 480, and
// times 140 it, unlike 448, is infinite; zero times infinity is NaN.
template <>
struct Widen<Float8, false> {
  template <int kFirst, int kSecond>
  static __device__ __forceinline__ uint32_t pair(uint32_t bytes) {
    constexpr uint32_t kSelectors = 0x0404 | kSecond << 12 | kFirst << 4, kSign = both(0x8000);
    const uint32_t upper = prmt<kSelectors>(bytes, 0);
    const uint32_t moved = (upper >> 1 & both(0x3f80)) | (upper & kSign);
    const uint32_t number = fma_f16x2(moved, both(0x5c00), kSign);   // times 2^8
    const uint32_t beyond = fma_f16x2(number, both(0x5860), kSign);  // times 140
    return fma_f16x2(beyond, 0, number);
  }
};

// Bytes (0, 1) and (2, 3).
template <typename Cached>
__device__ __forceinline__ void widen_neighbours(uint32_t bytes, uint32_t (&pairs)[2]) {
  pairs[0] = Widen<Cached>::template pair<0, 1>(bytes);
  pairs[1] = Widen<Cached>::template pair<2, 3>(bytes);
}

// Bytes (0, 2) and (1, 3).
template <typename Cached>
__device__ __forceinline__ void widen_alternate(uint32_t bytes, uint32_t (&pairs)[2]) {
  pairs[0] = Widen<Cached>::template pair<0, 2>(bytes);
  pairs[1] = Widen<Cached>::template pair<1, 3>(bytes);
}

}  // namespace tree_attention::cuda
