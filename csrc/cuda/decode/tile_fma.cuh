// SPDX-License-Identifier: BSD-3-Clause
//
// The tile of tile_mma.cuh for float32, on the ordinary units: the same functions. A thread's o are
// columns 4 (t + 4 i) and the next three, two in o[2 i] and two in o[2 i + 1], so that values are
// read 16 bytes at a time.
#pragma once

#include "warp_tile.cuh"

namespace tree_attention::cuda {

template <typename Config>
class TileFma : public WarpTile<Config, TileFma<Config>> {
 public:
  static constexpr int kMaxStepKeys = 8;

  // s [16, 8 kBlocks] = q [16, kColumns] k [8 kBlocks, kColumns]^T, as in tile_mma.cuh.
  template <int kBlocks>
  __device__ void score_block(float (&s)[kBlocks][4], const char* tile, int first_key) const {
    const int row = this->first_row_ + threadIdx.x % 32 / 4, key = first_key + threadIdx.x % 4 * 2;
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
      // Eight sums of an eighth of the products have smaller rounding errors than one sum of all.
      float sums[8][4] = {};
#pragma unroll 4
      for (int chunk = 0; chunk < kColumns / 4; ++chunk) {
        const Float4 q[2] = {load(this->queries_, row, chunk),
                             load(this->queries_, row + 8, chunk)};
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

  // o [16, kColumns] += p [16, 8 kBlocks] v [8 kBlocks, kColumns].
  template <int kBlocks>
  __device__ void value_block(const float (&p)[kBlocks][4], const char* tile, int first_key) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
      float weights[8][2];  // of the thread's two rows, each in one of the four threads of its row
#pragma unroll
      for (int key = 0; key < 8; ++key) {
        const int owner = lane / 4 * 4 + key / 2;
        for (int row = 0; row < 2; ++row) {
          weights[key][row] = __shfl_sync(0xffffffff, p[n][2 * row + key % 2], owner);
        }
      }
#pragma unroll
      for (int i = 0; i < kColumns / 16; ++i) {
        // The compiler moves no load across this: it would move more than there are registers for.
        if (i % 4 == 0) __syncwarp();
        // A sum of its own for eight keys: o takes an eighth of the roundings.
        float sums[2][4] = {};
#pragma unroll
        for (int key = 0; key < 8; ++key) {
          const Float4 v = load(tile, first_key + 8 * n + key, lane % 4 + 4 * i);
          for (int row = 0; row < 2; ++row) {
            for (int c = 0; c < 4; ++c) {
              sums[row][c] = fmaf(weights[key][row], v.value[c], sums[row][c]);
            }
          }
        }
        for (int row = 0; row < 2; ++row) {
          for (int c = 0; c < 4; ++c) o_[2 * i + c / 2][2 * row + c % 2] += sums[row][c];
        }
      }
    }
  }

  static constexpr float kOutputScale = 1.0f;
  static constexpr int kParts = 4;
  static __device__ int column_of_part(int i) {
    return i / 2 * 16 + threadIdx.x % 4 * 4 + i % 2 * 2;
  }

  __device__ Float2 part(int first, int i, int row) const {
    const float* o = o_[first / 8 + i] + 2 * row;
    return {o[0], o[1]};
  }

 private:
  using Base = WarpTile<Config, TileFma>;
  friend Base;
  using Base::kColumns, Base::o_;
  using Rows = typename Config::QueryRows;  // those of keys and values, too

  static __device__ Float4 load(const char* memory, int row, int chunk) {
    return load_float4(reinterpret_cast<const float*>(memory + Rows::offset(row, chunk)));
  }
};

}  // namespace tree_attention::cuda
