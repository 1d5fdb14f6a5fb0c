// SPDX-License-Identifier: BSD-3-Clause
#include "quantise_row.h"

#include <bit>
#include <cmath>
#include <cstring>

#include "multiversioned.h"

namespace tree_attention::cpu {
namespace {

constexpr uint32_t kMagnitude = 0x7fffffff, kInfinity = 0x7f800000;

// The largest of the magnitudes, which are in the order of their bits; NaN and infinity last.
MULTIVERSIONED uint32_t largest_magnitude(const float* x, int64_t n) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t magnitude = std::bit_cast<uint32_t>(x[i]) & kMagnitude;
    largest = magnitude > largest ? magnitude : largest;
  }
  return largest;
}

// `a` where the condition holds, else `b`. Compilers do not vectorise a choice of floats, which may
// trap.
inline uint32_t choose(bool condition, uint32_t a, uint32_t b) {
  const uint32_t mask = 0u - static_cast<uint32_t>(condition);
  return (a & mask) | (b & ~mask);
}

// Quotients may exceed the largest number where the scale is subnormal, and so rounded far: at most
// twice.
MULTIVERSIONED void divide_and_round(const float* x, int64_t n, float scale, int8_t* out) {
  constexpr float kRound = 3 << 22;  // adding it rounds to an integer, ties to even
  for (int64_t i = 0; i < n; ++i) {
    const auto rounded = static_cast<int32_t>((x[i] / scale + kRound) - kRound);
    const int32_t below = rounded < 127 ? rounded : 127;
    out[i] = static_cast<int8_t>(below > -127 ? below : -127);
  }
}

MULTIVERSIONED void divide_and_round(const float* x, int64_t n, float scale, uint8_t* out) {
  constexpr uint32_t kLargest = std::bit_cast<uint32_t>(448.0f);
  constexpr uint32_t kSmallestNormal = std::bit_cast<uint32_t>(0x1p-6f);
  constexpr float kRound = 0x1p14f;  // adding it leaves units of 2^-9 in the low bits
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t bits = std::bit_cast<uint32_t>(x[i] / scale), magnitude = bits & kMagnitude;
    const uint32_t saturated = magnitude < kLargest ? magnitude : kLargest;
    const uint32_t normal =
        ((saturated + 0x7ffffu + (saturated >> 20 & 1u)) >> 20) - ((127 - 7) << 3);
    const uint32_t subnormal = std::bit_cast<uint32_t>(std::bit_cast<float>(saturated) + kRound) -
                               std::bit_cast<uint32_t>(kRound);
    const uint32_t rounded = choose(saturated < kSmallestNormal, subnormal, normal);
    const uint32_t or_nan = choose(magnitude > kInfinity, 0x7f, rounded);
    out[i] = static_cast<uint8_t>(or_nan | bits >> 31 << 7);
  }
}

template <typename T>
void quantise(const float* x, int64_t n, float largest_number, T* out, float* scale) {
  const uint32_t largest = largest_magnitude(x, n);
  *scale = largest < kInfinity ? std::bit_cast<float>(largest) / largest_number : NAN;
  if (*scale > 0.0f) {
    divide_and_round(x, n, *scale, out);
  } else {
    std::memset(out, 0, n);
  }
}

}  // namespace

void quantise_row(const float* x, int64_t n, Int8* out, float* scale) {
  quantise(x, n, 127.0f, reinterpret_cast<int8_t*>(out), scale);
}

void quantise_row(const float* x, int64_t n, Float8* out, float* scale) {
  auto* bits = reinterpret_cast<uint8_t*>(out);
  if (scale == nullptr) {
    divide_and_round(x, n, 1.0f, bits);
  } else {
    quantise(x, n, 448.0f, bits, scale);
  }
}

}  // namespace tree_attention::cpu
