// SPDX-License-Identifier: BSD-3-Clause
//
// The queries of products with keys of 8 bits (tile_mma_8_bits.cuh, tile_mma_swapped_8_bits.cuh).
#pragma once

#include <type_traits>

#include "tile_copies.cuh"

namespace tree_attention::cuda {

template <typename Config, typename Element>
struct QueriesAsFloat16 {
  // Queries in bfloat16 become float16 in units of a power of two for each row, in which the row's
  // largest is less than 2^15. Elements down to 2^-31 of it are exact, and none is off by
  // more than 2^-39 of it.
  static constexpr bool kHasUnits = std::is_same_v<Element, BFloat16>;

  // For four neighbouring lanes at a time the unit of their row. It is the same in all column
  // groups, whose products are added; `queries` are this column group's.
  static __device__ float unit_of_row(const char* queries, int row) {
    queries -=
        WarpGroups<Config>().column * Config::kWarpColumns * static_cast<int>(sizeof(Element));
    float largest = 0.0f;
#pragma unroll 1
    for (int chunk = threadIdx.x % 4; chunk < Rows::kChunks; chunk += 4) {
      const Float4 pairs =
          load_float4(reinterpret_cast<const float*>(queries + Rows::offset(row, chunk)));
      for (const float pair : pairs.value) {  // the lower number only adds to the upper's digits
        const uint32_t bits = __builtin_bit_cast(uint32_t, pair);
        largest = fmaxf(largest, fabsf(pair));
        largest = fmaxf(largest, fabsf(__builtin_bit_cast(float, bits << 16)));
      }
    }
    largest = combine_lanes<1, 4>(largest, [](float a, float b) { return fmaxf(a, b); });
    const uint32_t exponent = __builtin_bit_cast(uint32_t, fmaxf(largest, 0x1p-100f)) >> 23;
    return __builtin_bit_cast(float, (exponent - 14) << 23);
  }

  // Four neighbouring columns of a piece, which move in one 8-byte access. Thread t has columns 4 t
  // to 4 t + 3: the first two take the place of columns 2 t and 2 t + 1, the others the place of
  // columns 2 t + 8 and 2 t + 9.
  struct __align__(8) Columns {
    uint32_t low, high;
  };

  // A pair of queries in its row's unit.
  static __device__ uint32_t to_float16(uint32_t pair, float unit) {
    if constexpr (!kHasUnits) return pair;
    const float inverse = inverse_of_power(unit);
    const BFloat16 low{static_cast<uint16_t>(pair)}, high{static_cast<uint16_t>(pair >> 16)};
    return cvt_f16x2(to_float(low) * inverse, to_float(high) * inverse);
  }

 private:
  using Rows = typename Config::QueryRows;

  static __device__ float inverse_of_power(float power_of_two) {
    return __builtin_bit_cast(float, (254u << 23) - __builtin_bit_cast(uint32_t, power_of_two));
  }
};

}  // namespace tree_attention::cuda
