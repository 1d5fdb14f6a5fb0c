// SPDX-License-Identifier: BSD-3-Clause
//
// The tile of tile_mma.cuh for 8 packed rows: the same functions, with the operands of every
// product swapped. The 16 lines of an mma are keys, and then columns of values; its 8 columns are
// rows. So no product, no weight and no register of o is spent on rows that do not exist.
#pragma once

#include "tile_mma.cuh"

namespace tree_attention::cuda {

// The weights of a block of 16 keys as they are the operand of an mma, from two registers, of keys
// g and g + 8, with a pair of rows each: an operand has pairs of keys of one row.
__device__ __forceinline__ void transpose_weights(uint32_t (&p)[2]) {
  for (uint32_t& pairs : p) pairs = movmatrix_trans(pairs);
}

template <typename Config, typename Element>
class TileMmaSwapped : public WarpTile<Config, TileMmaSwapped<Config, Element>> {
  using Weights = WeightsOf16Bits<Element>;

 public:
  static constexpr int kMaxStepKeys = 32;

  // s [16 kBlocks, 8] = k [16 kBlocks, columns] q [8, columns]^T for the columns that the warp
  // multiplies, k from row `first_key` of the tile on.
  template <int kBlocks>
  __device__ void score_block(float (&s)[kBlocks][4], const char* tile, int first_key) const {
    const int lane = threadIdx.x % 32;
    const uint32_t first = shared_address(tile + Rows::offset(first_key + lane % 16, lane / 16));
    this->clear(s);
#pragma unroll
    for (int i = 0; i < Config::kWarpPieces; ++i) {
      uint32_t q[2];
      this->get_query(q, i);
#pragma unroll
      for (int n = 0; n < kBlocks; ++n) {
        uint32_t k[4];
        ldmatrix_x4(k, Rows::moved(first, 16 * n, 2 * i));
        mma<Element>(s[n], k, q[0], q[1]);
      }
    }
  }

  // o [kColumns, 8] += v [16 kBlocks, kColumns]^T p [16 kBlocks, 8], with the weights p in the
  // place of s and v from row `first_key` of the tile on.
  template <int kBlocks>
  __device__ void value_block(const float (&p)[kBlocks][4], const char* tile, int first_key) {
    const int lane = threadIdx.x % 32, row = first_key + lane / 16 * 8 + lane % 8;
    const uint32_t first = shared_address(tile + Rows::offset(row, lane / 8 % 2));
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
      uint32_t b[2] = {Weights::pack(p[n][0], p[n][1]), Weights::pack(p[n][2], p[n][3])};
      transpose_weights(b);
#pragma unroll
      for (int i = 0; i < kColumns / 16; ++i) {
        uint32_t v[4];
        ldmatrix_x4_trans(v, Rows::moved(first, 16 * n, 2 * i));
        mma<Element>(o_[i], v, b[0], b[1]);
      }
    }
  }

  static constexpr float kOutputScale = Weights::kOutputScale;
  static constexpr int kParts = 4;
  static __device__ int column_of_part(int i) { return 8 * i + threadIdx.x % 32 / 4; }

  __device__ Float1 part(int first, int i, int row) const {
    return {o_[first / 16 + i / 2][i % 2 * 2 + row]};
  }

 private:
  using Base = WarpTile<Config, TileMmaSwapped>;
  friend Base;
  using Base::kColumns, Base::o_;
  using Rows = typename Config::CachedRows;
  static_assert(Config::kPieceStep == 1);

  __device__ void load_query(uint32_t (&q)[2], int i) const {
    const int row = threadIdx.x % 32 / 4;
    for (int half = 0; half < 2; ++half) {
      const char* chunk = this->queries_ + Config::QueryRows::offset(row, 2 * i + half);
      q[half] = reinterpret_cast<const uint32_t*>(chunk)[threadIdx.x % 4];
    }
  }
};

}  // namespace tree_attention::cuda
