// SPDX-License-Identifier: BSD-3-Clause
//
// The tile of tile_mma.cuh for float32, on the ordinary units: the same rows and scores per thread,
// the same functions. Its o is kept as columns 4 (t + 4 i) ... of row 0 in o[2 i] and of row 1 in
// o[2 i + 1], so that values are read 16 bytes at a time.
#pragma once

#include "tile_config.cuh"

namespace tree_attention::cuda {

template <typename Config>
class TileFma {
 public:
  static constexpr int kMaxStepKeys = 8;

  // The queries stay in shared memory.
  __device__ void load_queries(const char* queries, int row_group) {
    queries_ = queries;
    first_row_ = 16 * row_group;
  }

  // s [16, 8 kBlocks] = q [16, head_dim] k [8 kBlocks, head_dim]^T, as in tile_mma.cuh.
  template <int kBlocks>
  __device__ void score_block(float (&s)[kBlocks][4], const char* tile, int first_key) const {
    const int row = first_row_ + threadIdx.x % 32 / 4, key = first_key + threadIdx.x % 4 * 2;
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
      // Eight sums of an eighth of the products have smaller rounding errors than one sum of all.
      float sums[8][4] = {};
#pragma unroll 4
      for (int chunk = 0; chunk < Rows::kChunks; ++chunk) {
        const Float4 q[2] = {load(queries_, row, chunk), load(queries_, row + 8, chunk)};
        const Float4 k[2] = {load(tile, key + 8 * n, chunk), load(tile, key + 8 * n + 1, chunk)};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          for (int c = 0; c < 4; ++c) {
            float& sum = sums[chunk % 2 * 4 + i][c];
            sum = fmaf(q[c / 2].value[i], k[c % 2].value[i], sum);
          }
        }
      }
#pragma unroll
      for (int count = 4; count > 0; count /= 2) {
        for (int i = 0; i < count; ++i) {
          for (int c = 0; c < 4; ++c) sums[i][c] += sums[i + count][c];
        }
      }
      for (int c = 0; c < 4; ++c) s[n][c] = sums[0][c];
    }
  }

  // o [16, head_dim] += p [16, 8 kBlocks] v [8 kBlocks, head_dim].
  template <int kBlocks>
  __device__ void value_block(const float (&p)[kBlocks][4], const char* tile, int first_key) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
      for (int key = 0; key < 8; ++key) {
        // The weights of this key are in one of the four threads of the rows.
        const int owner = lane / 4 * 4 + key / 2;
        const float p0 = __shfl_sync(0xffffffff, p[n][key % 2], owner);
        const float p1 = __shfl_sync(0xffffffff, p[n][2 + key % 2], owner);
#pragma unroll
        for (int i = 0; i < kHeadDim / 16; ++i) {
          const Float4 v = load(tile, first_key + 8 * n + key, lane % 4 + 4 * i);
#pragma unroll
          for (int c = 0; c < 4; ++c) {
            o_[2 * i][c] = fmaf(p0, v.value[c], o_[2 * i][c]);
            o_[2 * i + 1][c] = fmaf(p1, v.value[c], o_[2 * i + 1][c]);
          }
        }
      }
    }
  }

  __device__ void clear() {
#pragma unroll
    for (int n = 0; n < kHeadDim / 8; ++n) {
      for (int c = 0; c < 4; ++c) o_[n][c] = 0.0f;
    }
  }

  __device__ void rescale(const float (&factor)[2]) {
#pragma unroll
    for (int n = 0; n < kHeadDim / 8; ++n) {
      for (int c = 0; c < 4; ++c) o_[n][c] *= factor[n % 2];
    }
  }

  template <typename Store>
  __device__ __forceinline__ void for_each_value(int begin, Store store) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < 4; ++n) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        store(lane / 4 + n % 2 * 8, n / 2 * 16 + lane % 4 * 4 + c, o_[begin / 8 + n][c]);
      }
    }
  }

 private:
  using Rows = typename Config::QueryRows;  // those of keys and values, too
  static constexpr int kHeadDim = Config::kHeadDim;

  static __device__ Float4 load(const char* memory, int row, int chunk) {
    return load_float4(reinterpret_cast<const float*>(memory + Rows::offset(row, chunk)));
  }

  const char* queries_;
  int first_row_;
  float o_[kHeadDim / 8][4];
};

}  // namespace tree_attention::cuda
