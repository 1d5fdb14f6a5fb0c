// SPDX-License-Identifier: BSD-3-Clause
//
// The tile of tile_mma.cuh for keys and values of 8 bits, which become 16 in registers: the same
// functions. ldmatrix sees pairs of bytes as elements: a thread receives columns 4 t to 4 t + 3 of
// a key where it would receive two, and two columns of each of two values. So that these are
// operands as they come, columns are permuted inside each chunk of 16, of queries and keys alike
// for the scores, which do not notice, and of o for the values.
#pragma once

#include "tile_mma.cuh"
#include "widen.cuh"

namespace tree_attention::cuda {

template <typename Config, typename Element>
class TileMma8Bits : public WarpTile<Config, TileMma8Bits<Config, Element>> {
 public:
  // A step must not hold more scores than registers allow beside o and what becomes 16 bits.
  static constexpr int kMaxStepKeys = Config::kWarpColumns > 64 ? 16 : 32;

  // s [16, 8 kBlocks] = q [16, kColumns] k [8 kBlocks, kColumns]^T, k from row `first_key` of the
  // tile on, without its scales.
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
          widen<Element, Cached>(k[matrix], pairs);
          mma<Element>(s[n + matrix / 2], q[matrix % 2], pairs[0], pairs[1]);
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
      uint32_t a[kTerms][4];
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        pack_weights(a, c, p[n + c / 2][c % 2 * 2], p[n + c / 2][c % 2 * 2 + 1]);
      }
#pragma unroll
      for (int i = 0; i < kChunks; i += 2) {
        uint32_t v[4];
        ldmatrix_x4_trans(v, Rows::moved(first, 8 * n, i));
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          uint32_t low[2], high[2];  // keys 0 to 7 and 8 to 15: their even and odd columns
          widen<BFloat16, Cached>(v[2 * half], low);
          widen<BFloat16, Cached>(v[2 * half + 1], high);
#pragma unroll
          for (int odd = 0; odd < 2; ++odd) {
#pragma unroll
            for (int term = 0; term < kTerms; ++term) {
              mma<BFloat16>(o_[2 * (i + half) + odd], a[term], low[odd], high[odd]);
            }
          }
        }
      }
    }
  }

 private:
  using Base = WarpTile<Config, TileMma8Bits>;
  friend Base;
  using Base::kColumns, Base::o_;
  using Cached = typename Config::Cached;
  using Rows = typename Config::CachedRows;
  static constexpr int kChunks = kColumns / 16;  // of 16 columns
  static constexpr float kOutputScale = 1.0f;

  // Weights with scales have any magnitude, which float16 has not. bfloat16 has fewer digits than
  // float16 queries deserve: two of it are one weight.
  static constexpr int kTerms = std::is_same_v<Element, Float16> ? 2 : 1;

  static __device__ void pack_weights(uint32_t (&a)[kTerms][4], int c, float low, float high) {
    a[0][c] = cvt_bf16x2(low, high);
    if constexpr (kTerms == 2) {
      const auto rest = [](float weight, uint32_t upper_half) {
        const float term = __builtin_bit_cast(float, upper_half);
        return term - term == 0.0f ? weight - term : 0.0f;  // infinity and NaN have no rest
      };
      a[1][c] = cvt_bf16x2(rest(low, a[0][c] << 16), rest(high, a[0][c] & 0xffff0000));
    }
  }

  static __device__ int column(int n, int c) {
    return n / 2 * 16 + threadIdx.x % 4 * 4 + c % 2 * 2 + n % 2;
  }

  // Columns are in the order of widen: 4 t and 4 t + 2 in the place of 2 t and 2 t + 1, 4 t + 1 and
  // 4 t + 3 in that of 2 t + 8 and 2 t + 9.
  __device__ void load_query(uint32_t (&q)[4], int i) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = this->first_row_ + lane / 4 + 8 * half;
      const int offset = Config::QueryRows::offset(row, 2 * i + lane % 4 / 2) + lane % 2 * 8;
      const Pairs columns = *reinterpret_cast<const Pairs*>(this->queries_ + offset);
      q[half] = (columns.low & 0xffff) | columns.high << 16;
      q[2 + half] = columns.low >> 16 | (columns.high & 0xffff0000);
    }
  }

  // Four neighbouring columns, which move in one 8-byte access.
  struct __align__(8) Pairs {
    uint32_t low, high;
  };
};

}  // namespace tree_attention::cuda
