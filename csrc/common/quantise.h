// SPDX-License-Identifier: BSD-3-Clause
//
// Numbers of 8 bits with a float32 scale for each row: what append_kv computes, on every backend
// with the same bits.
#pragma once

#include <cmath>
#include <cstdint>

#include "dtype.h"
#include "host_device.h"

namespace tree_attention {

constexpr uint32_t kInfinityBits = 0x7f800000;

// Magnitudes are in the order of their bits; infinity and NaN are not below kInfinityBits.
TREE_ATTENTION_HOST_DEVICE uint32_t magnitude_bits(float x) {
  return __builtin_bit_cast(uint32_t, x) & 0x7fffffff;
}

// What the largest magnitude of a row becomes.
template <typename T>
constexpr float kLargestNumber = 0.0f;
template <>
inline constexpr float kLargestNumber<Int8> = 127.0f;
template <>
inline constexpr float kLargestNumber<Float8> = 448.0f;

// The scale of a row, from the bits of its largest magnitude. NaN for one with a NaN or an
// infinity: such a row, and one whose scale is zero, becomes zeros.
template <typename T>
TREE_ATTENTION_HOST_DEVICE float scale_of_row(uint32_t largest) {
  const float magnitude = __builtin_bit_cast(float, largest);
  return largest < kInfinityBits ? magnitude / kLargestNumber<T> : NAN;
}

// `a` where the condition holds, else `b`. Compilers do not vectorise a choice of floats, which may
// trap.
TREE_ATTENTION_HOST_DEVICE uint32_t choose(bool condition, uint32_t a, uint32_t b) {
  const uint32_t mask = 0u - static_cast<uint32_t>(condition);
  return (a & mask) | (b & ~mask);
}

// The nearest number; ties go to the even one. Quotients may exceed the largest number where the
// scale is subnormal, and so rounded far: at most twice.
template <typename T>
TREE_ATTENTION_HOST_DEVICE T quantised(float quotient);

template <>
TREE_ATTENTION_HOST_DEVICE Int8 quantised<Int8>(float quotient) {
  constexpr float kRound = 3 << 22;  // adding it rounds to an integer, ties to even
  const auto rounded = static_cast<int32_t>((quotient + kRound) - kRound);
  const int32_t below = rounded < 127 ? rounded : 127;
  return {static_cast<int8_t>(below > -127 ? below : -127)};
}

// It saturates, and a NaN stays one.
template <>
TREE_ATTENTION_HOST_DEVICE Float8 quantised<Float8>(float quotient) {
  constexpr uint32_t kLargest = __builtin_bit_cast(uint32_t, 448.0f);
  constexpr uint32_t kSmallestNormal = __builtin_bit_cast(uint32_t, 0x1p-6f);
  constexpr float kRound = 0x1p14f;  // adding it leaves units of 2^-9 in the low bits
  const uint32_t bits = __builtin_bit_cast(uint32_t, quotient),
                 magnitude = magnitude_bits(quotient);
  const uint32_t saturated = magnitude < kLargest ? magnitude : kLargest;
  const uint32_t normal =
      ((saturated + 0x7ffffu + (saturated >> 20 & 1u)) >> 20) - ((127 - 7) << 3);
  const float sum = __builtin_bit_cast(float, saturated) + kRound;
  const uint32_t subnormal =
      __builtin_bit_cast(uint32_t, sum) - __builtin_bit_cast(uint32_t, kRound);
  const uint32_t rounded = choose(saturated < kSmallestNormal, subnormal, normal);
  const uint32_t or_nan = choose(magnitude > kInfinityBits, 0x7f, rounded);
  return {static_cast<uint8_t>(or_nan | bits >> 31 << 7)};
}

}  // namespace tree_attention
