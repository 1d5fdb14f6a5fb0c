// SPDX-License-Identifier: BSD-3-Clause
//
// How tensor cores sum, as measured from outside: Fasi, Higham, Mikaitis, Pranesh, "Numerical
// behavior of NVIDIA tensor cores" (PeerJ Computer Science 7:e330, 2021); Khattak, Mikaitis,
// "Accurate Models of NVIDIA Tensor Cores" (arXiv:2512.07004, 2025).
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>

namespace tree_attention::emulator {

// The accumulator and `block` products at a time are aligned to the largest exponent among them and
// cut off after 23 + `extra_bits` binary places. Their sum is exact and cut off to float32.
struct TensorCore {
  int block;  // 0: no such core; sums in float32, in order, each rounded to nearest
  int extra_bits;
};
inline constexpr TensorCore kRounding{0, 0}, kA100{8, 1}, kH100{16, 2};

// That of the emulated device.
TensorCore& tensor_core();

inline int exponent_of(float x) { return (std::bit_cast<uint32_t>(x) >> 23 & 0xff) - 127; }

inline double power_of_two(int exponent) {
  return std::bit_cast<double>(static_cast<uint64_t>(exponent + 1023) << 52);
}

// x as float32, rounded toward zero. Below the normal numbers, where no sum of weights and values
// is, the last step rounds to nearest.
inline float truncate_to_float(double x) {
  const uint64_t digits_of_double = (uint64_t{1} << 29) - 1;
  return static_cast<float>(std::bit_cast<double>(std::bit_cast<uint64_t>(x) & ~digits_of_double));
}

// c + a[0] b[0] + ... of a block. The factors are numbers of 16 bits, whose products double holds.
inline float add_products(const TensorCore& core, float c, const float* a, const float* b) {
  int largest = c == 0.0f ? -1000 : exponent_of(c);
  double products[16];
  bool finite = std::isfinite(c);
  for (int k = 0; k < core.block; ++k) {
    products[k] = double{a[k]} * double{b[k]};
    finite = finite && std::isfinite(products[k]);
    if (products[k] != 0.0) largest = std::max(largest, exponent_of(a[k]) + exponent_of(b[k]));
  }
  if (!finite) {
    for (int k = 0; k < core.block; ++k) c += static_cast<float>(products[k]);
    return c;
  }
  if (largest == -1000) return c;
  const int last_place = largest - 23 - core.extra_bits;
  const double scale = power_of_two(-last_place);
  int64_t sum = static_cast<int64_t>(double{c} * scale);
  for (int k = 0; k < core.block; ++k) sum += static_cast<int64_t>(products[k] * scale);
  return truncate_to_float(static_cast<double>(sum) * power_of_two(last_place));
}

// d += a b^T, on the emulated device's core.
inline void add_products(const float (&a)[16][16], const float (&b)[8][16], float (&d)[16][8]) {
  const TensorCore& core = tensor_core();
  if (core.block > 0) {
    for (int m = 0; m < 16; ++m) {
      for (int n = 0; n < 8; ++n) {
        for (int k = 0; k < 16; k += core.block) {
          d[m][n] = add_products(core, d[m][n], &a[m][k], &b[n][k]);
        }
      }
    }
    return;
  }
  float transposed[16][8], sums[16][8] = {};
  for (int k = 0; k < 16; ++k) {
    for (int n = 0; n < 8; ++n) transposed[k][n] = b[n][k];
  }
  for (int m = 0; m < 16; ++m) {
    for (int k = 0; k < 16; ++k) {
      for (int n = 0; n < 8; ++n) sums[m][n] += a[m][k] * transposed[k][n];
    }
    for (int n = 0; n < 8; ++n) d[m][n] += sums[m][n];
  }
}

}  // namespace tree_attention::emulator
