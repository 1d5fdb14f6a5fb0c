// SPDX-License-Identifier: BSD-3-Clause
//
// The tile of tile_mma.cuh for keys and values of 8 bits, which become float16 in registers: the
// same functions. ldmatrix sees pairs of bytes as elements: a thread receives columns 4 t to 4 t +
// 3 of a key where it would receive two, and two columns of each of two values. So that these are
// operands as they come, columns are permuted inside each chunk of 16, of queries and keys alike
// for the scores, which do not notice, and of o for the values.
#pragma once

#include "queries_as_float16.cuh"
#include "tile_mma.cuh"
#include "widen.cuh"

namespace tree_attention::cuda {

template <typename Config, typename Element>
class TileMma8Bits : public WarpTile<Config, TileMma8Bits<Config, Element>> {
  using Queries = QueriesAsFloat16<Config, Element>;
  static constexpr bool kHasUnits = Queries::kHasUnits;

 public:
  // A step must not hold more scores than fit into registers together with o, the queries and
  // units.
  static constexpr int kMaxStepKeys =
      Config::kWarpColumns > 64 && (kHasUnits || Config::kColumnGroups > 1) ? 16 : 32;

  // To be called by whole warps.
  __device__ void load_queries(const char* queries, int row_group) {
    const int row = 16 * row_group + threadIdx.x % 32 / 4;
    if constexpr (kHasUnits) {
      units_ =
          cvt_bf16x2(Queries::unit_of_row(queries, row), Queries::unit_of_row(queries, row + 8));
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

  // o [16, kColumns] += p [16, 8 kBlocks] v [8 kBlocks, kColumns], with OnlineSoftmax::fit's
  // products p in the place of s and v from row `first_key` of the tile on.
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
        a[c] = cvt_f16x2(pair[0], pair[1]);
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

  static constexpr float kOutputScale = 1.0f;
  static constexpr int kParts = 4;
  static __device__ int column_of_part(int i) {
    return i / 2 * 16 + threadIdx.x % 4 * 4 + i % 2 * 2;
  }

  __device__ Float2 part(int first, int i, int row) const {
    const int n = first / 8 + i / 2 * 2, c = 2 * row + i % 2;
    return {o_[n][c], o_[n + 1][c]};
  }

 private:
  using Base = WarpTile<Config, TileMma8Bits>;
  friend Base;
  using Base::kColumns, Base::o_;
  using Cached = typename Config::Cached;
  using Rows = typename Config::CachedRows;
  static constexpr int kChunks = kColumns / 16;  // of 16 columns
  __device__ void load_query(uint32_t (&q)[4], int i) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = this->first_row_ + lane / 4 + 8 * half;
      const int offset = Config::QueryRows::offset(row, 2 * i + lane % 4 / 2) + lane % 2 * 8;
      const auto columns =
          *reinterpret_cast<const typename Queries::Columns*>(this->queries_ + offset);
      q[half] = Queries::to_float16(columns.low, product_unit(half));
      q[2 + half] = Queries::to_float16(columns.high, product_unit(half));
    }
    if constexpr (kHasUnits) __syncwarp();  // else all are loaded first, for which registers lack
  }

  uint32_t units_;  // of the thread's two rows, a pair of bfloat16: registers are scarce
};

}  // namespace tree_attention::cuda
