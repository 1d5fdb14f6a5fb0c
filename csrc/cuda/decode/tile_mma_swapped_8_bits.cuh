// SPDX-License-Identifier: BSD-3-Clause
//
// The tile of tile_mma_swapped.cuh for keys and values of 8 bits, which become float16 in registers
// as in tile_mma_8_bits.cuh. Here two columns of two values are two lines of the operand, so that
// of each 16 columns of o the first 8 lines are the even ones.
#pragma once

#include "tile_mma_8_bits.cuh"
#include "tile_mma_swapped.cuh"

namespace tree_attention::cuda {

template <typename Config, typename Element>
class TileMmaSwapped8Bits : public WarpTile<Config, TileMmaSwapped8Bits<Config, Element>> {
  using Queries = QueriesAsFloat16<Config, Element>;

 public:
  static constexpr int kMaxStepKeys = 32;

  // To be called by whole warps.
  __device__ void load_queries(const char* queries, int row_group) {
    if constexpr (Queries::kHasUnits) {
      query_unit_ = Queries::unit_of_row(queries, threadIdx.x % 32 / 4);
      for (int i = 0; i < 2; ++i) {
        units_[i] = __shfl_sync(0xffffffff, query_unit_, 4 * (Fragments::first_row() + i));
      }
    }
    Base::load_queries(queries, row_group);
  }

  // s [16 kBlocks, 8] = k [16 kBlocks, kColumns] q [8, kColumns]^T, k from row `first_key` of the
  // tile on, without its scales and in units of product_unit.
  template <int kBlocks>
  __device__ void score_block(float (&s)[kBlocks][4], const char* tile, int first_key) const {
    const int lane = threadIdx.x % 32;
    const uint32_t first = shared_address(tile + Rows::offset(first_key + lane % 16, lane / 16));
    this->clear(s);
#pragma unroll
    for (int i = 0; i < kChunks; i += 2) {
      uint32_t q[2][2];
#pragma unroll
      for (int half = 0; half < 2; ++half) this->get_query(q[half], i + half);
#pragma unroll
      for (int n = 0; n < kBlocks; ++n) {
        uint32_t k[4];
        ldmatrix_x4(k, Rows::moved(first, 16 * n, i));
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          uint32_t low[2], high[2];  // keys 0 to 7 and 8 to 15: their pairs of columns
          widen_neighbours<Cached>(k[2 * half], low);
          widen_neighbours<Cached>(k[2 * half + 1], high);
          const uint32_t a[4] = {low[0], high[0], low[1], high[1]};
          mma<Float16>(s[n], a, q[half][0], q[half][1]);
        }
      }
    }
  }

  // o [kColumns, 8] += v [16 kBlocks, kColumns]^T p [16 kBlocks, 8], with OnlineSoftmax::fit's
  // products p in the place of s and v from row `first_key` of the tile on.
  template <int kBlocks>
  __device__ void value_block(const float (&p)[kBlocks][4], const char* tile, int first_key) {
    const int lane = threadIdx.x % 32;
    const uint32_t first = shared_address(tile + Rows::offset(first_key + lane % 16, lane / 16));
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
      uint32_t b[2] = {cvt_f16x2(p[n][0], p[n][1]), cvt_f16x2(p[n][2], p[n][3])};
      transpose_weights(b);
#pragma unroll
      for (int i = 0; i < kChunks; i += 2) {
        uint32_t v[4];
        ldmatrix_x4_trans(v, Rows::moved(first, 16 * n, i));
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          uint32_t low[2], high[2];  // keys 0 to 7 and 8 to 15: their even and odd columns
          widen_alternate<Cached>(v[2 * half], low);
          widen_alternate<Cached>(v[2 * half + 1], high);
          const uint32_t a[4] = {low[0], low[1], high[0], high[1]};
          mma<Float16>(o_[i + half], a, b[0], b[1]);
        }
      }
    }
  }

  // What the products of the thread's row `i` are multiples of.
  __device__ float product_unit(int i) const {
    if constexpr (!Queries::kHasUnits) return 1.0f;
    return units_[i];
  }

  static constexpr float kOutputScale = 1.0f;
  static constexpr int kParts = 2;
  static __device__ int column_of_part(int i) { return 16 * i + threadIdx.x % 32 / 4 * 2; }

  __device__ Float2 part(int first, int i, int row) const {
    const float (&o)[4] = o_[first / 16 + i];
    return {o[row], o[2 + row]};
  }

 private:
  using Base = WarpTile<Config, TileMmaSwapped8Bits>;
  friend Base;
  using Base::kColumns, Base::o_;
  using typename Base::Fragments;
  using Cached = typename Config::Cached;
  using Rows = typename Config::CachedRows;
  static constexpr int kChunks = kColumns / 16;  // of 16 columns

  __device__ void load_query(uint32_t (&q)[2], int i) const {
    const int lane = threadIdx.x % 32;
    const int offset = Config::QueryRows::offset(lane / 4, 2 * i + lane % 4 / 2) + lane % 2 * 8;
    const auto columns =
        *reinterpret_cast<const typename Queries::Columns*>(this->queries_ + offset);
    q[0] = Queries::to_float16(columns.low, query_unit_);
    q[1] = Queries::to_float16(columns.high, query_unit_);
  }

  float query_unit_;  // of the row whose queries the thread has, until they are loaded
  float units_[2];    // of the thread's two rows of scores
};

}  // namespace tree_attention::cuda
