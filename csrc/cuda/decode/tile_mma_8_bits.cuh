// SPDX-License-Identifier: BSD-3-Clause
//
// The tile of tile_mma.cuh for keys and values of 8 bits, which become float16 in registers: the
// same functions. ldmatrix sees pairs of bytes as elements: a thread receives columns 4 t to 4 t +
// 3 of a key where it would receive two, and two columns of each of two values. So that these are
// operands as they come, columns are permuted inside each chunk of 16, of queries and keys alike
// for the scores, which do not notice, and of o for the values.
#pragma once

#include "tile_mma.cuh"
#include "widen.cuh"

namespace tree_attention::cuda {

template <typename Config, typename Element>
class TileMma8Bits : public WarpTile<Config, TileMma8Bits<Config, Element>> {
  // Where queries are bfloat16, those of a row become float16 in units of a power of two, in which
  // the row's largest is less than 2^15. Elements down to 2^-31 of it are exact, and none is off by
  // more than 2^-39 of it.
  static constexpr bool kHasUnits = std::is_same_v<Element, BFloat16>;

 public:
  // A step must not hold more scores than registers allow beside o, the queries and their units.
  static constexpr int kMaxStepKeys =
      Config::kWarpColumns > 64 && (kHasUnits || Config::kColumnGroups > 1) ? 16 : 32;

  // To be called by whole warps.
  __device__ void load_queries(const char* queries, int row_group) {
    const int row = 16 * row_group + threadIdx.x % 32 / 4;
    if constexpr (kHasUnits) {
      units_ = cvt_bf16x2(unit_of_row(queries, row), unit_of_row(queries, row + 8));
    }
    Base::load_queries(queries, row_group);
  }

  // s [16, 8 kBlocks] = q [16, kColumns] k [8 kBlocks, kColumns]^T, k from row `first_key` of the
  // tile on, without its scales and in units of product_unit.
  template <int kBlocks>
  __device__ void score_block(float (&s)[kBlocks][4], const char* tile, int first_key) const {
    const int lane = threadIdx.x % 32;
    const int row = first_key + lane / 16 * 8 + lane % 8;
    const uint32_t first = shared_address(tile + Rows::offset(row, lane / 8 % 2));
    this->clear(s);
#pragma unroll
    for (int i = 0; i < kChunks; i += 2) {
      uint32_t q[2][4];
#pragma unroll
      for (int half = 0; half < 2; ++half) this->get_query(q[half], i + half);
#pragma unroll
      for (int n = 0; n < kBlocks; n += 2) {
        uint32_t k[4];
        ldmatrix_x4(k, Rows::moved(first, 8 * n, i));
#pragma unroll
        for (int matrix = 0; matrix < 4; ++matrix) {
          uint32_t pairs[2];
          widen_neighbours<Cached>(k[matrix], pairs);
          mma<Float16>(s[n + matrix / 2], q[matrix % 2], pairs[0], pairs[1]);
        }
      }
    }
  }

  // o [16, kColumns] += p [16, 8 kBlocks] v [8 kBlocks, kColumns], with the weights p, multiplied
  // by the scales of v, in the place of s and v from row `first_key` of the tile on.
  template <int kBlocks>
  __device__ void value_block(const float (&p)[kBlocks][4], const char* tile, int first_key) {
    const int lane = threadIdx.x % 32;
    const uint32_t first = shared_address(tile + Rows::offset(first_key + lane % 16, lane / 16));
#pragma unroll
    for (int n = 0; n < kBlocks; n += 2) {
      uint32_t a[4];
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const float* pair = p[n + c / 2] + c % 2 * 2;
        a[c] = cvt_f16x2(pair[0] * kWeightScale, pair[1] * kWeightScale);
      }
#pragma unroll
      for (int i = 0; i < kChunks; i += 2) {
        uint32_t v[4];
        ldmatrix_x4_trans(v, Rows::moved(first, 8 * n, i));
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          uint32_t low[2], high[2];  // keys 0 to 7 and 8 to 15: their even and odd columns
          widen_alternate<Cached>(v[2 * half], low);
          widen_alternate<Cached>(v[2 * half + 1], high);
#pragma unroll
          for (int odd = 0; odd < 2; ++odd) {
            mma<Float16>(o_[2 * (i + half) + odd], a, low[odd], high[odd]);
          }
        }
      }
    }
  }

  // What the products of the thread's row `i` are multiples of.
  __device__ float product_unit(int i) const {
    if constexpr (!kHasUnits) return 1.0f;
    return __builtin_bit_cast(float, i == 0 ? units_ << 16 : units_ & 0xffff0000);
  }

 private:
  using Base = WarpTile<Config, TileMma8Bits>;
  friend Base;
  using Base::kColumns, Base::o_;
  using Cached = typename Config::Cached;
  using Rows = typename Config::CachedRows;
  using QueryRows = typename Config::QueryRows;
  static constexpr int kChunks = kColumns / 16;  // of 16 columns
  // Products of weights and scales, which are at most 4 (scales.cuh), and with them o are scaled by
  // this, as those of tile_mma.cuh are.
  static constexpr float kWeightScale = 0x1p12f;
  static constexpr float kOutputScale = 1.0f / kWeightScale;

  // The same in all column groups, whose products are added; `queries` are those of this one's.
  static __device__ float unit_of_row(const char* queries, int row) {
    queries -= WarpGroups<Config>().column * kColumns * static_cast<int>(sizeof(Element));
    float largest = 0.0f;
#pragma unroll 1
    for (int chunk = threadIdx.x % 4; chunk < QueryRows::kChunks; chunk += 4) {
      const Float4 pairs =
          load_float4(reinterpret_cast<const float*>(queries + QueryRows::offset(row, chunk)));
      for (const float pair : pairs.value) {  // the lower number only adds to the upper's digits
        const uint32_t bits = __builtin_bit_cast(uint32_t, pair);
        largest = fmaxf(largest, fabsf(pair));
        largest = fmaxf(largest, fabsf(__builtin_bit_cast(float, bits << 16)));
      }
    }
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffff, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffff, largest, 2));
    const uint32_t exponent = __builtin_bit_cast(uint32_t, fmaxf(largest, 0x1p-100f)) >> 23;
    return __builtin_bit_cast(float, (exponent - 14) << 23);
  }

  static __device__ int column(int half) { return threadIdx.x % 4 * 4 + 2 * half; }

  __device__ Float2 pair(int n, int row, int half) const {
    return {o_[n][2 * row + half], o_[n + 1][2 * row + half]};
  }

  // Columns 4 t and 4 t + 1 in the place of 2 t and 2 t + 1, the next two in that of 2 t + 8 and
  // 2 t + 9.
  __device__ void load_query(uint32_t (&q)[4], int i) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = this->first_row_ + lane / 4 + 8 * half;
      const int offset = QueryRows::offset(row, 2 * i + lane % 4 / 2) + lane % 2 * 8;
      const Pairs columns = *reinterpret_cast<const Pairs*>(this->queries_ + offset);
      q[half] = to_float16(columns.low, half);
      q[2 + half] = to_float16(columns.high, half);
    }
    if constexpr (kHasUnits) __syncwarp();  // else all are loaded first, for which registers lack
  }

  static __device__ float inverse_of_power(float power_of_two) {
    return __builtin_bit_cast(float, (254u << 23) - __builtin_bit_cast(uint32_t, power_of_two));
  }

  // A pair of queries of the thread's row `i`.
  __device__ uint32_t to_float16(uint32_t pair, int i) const {
    if constexpr (!kHasUnits) return pair;
    const float inverse = inverse_of_power(product_unit(i));
    const BFloat16 low{static_cast<uint16_t>(pair)}, high{static_cast<uint16_t>(pair >> 16)};
    return cvt_f16x2(to_float(low) * inverse, to_float(high) * inverse);
  }

  // Four neighbouring columns, which move in one 8-byte access.
  struct __align__(8) Pairs {
    uint32_t low, high;
  };

  uint32_t units_;  // of the thread's two rows, a pair of bfloat16: registers are scarce
};

}  // namespace tree_attention::cuda
