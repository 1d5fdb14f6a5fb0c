// SPDX-License-Identifier: BSD-3-Clause
//
// The products of four warps with a tile: keys, and then columns of values, are the lines of a
// product, packed rows its columns. A thread has the same rows of scores and of o, and lines in the
// places of KeysByRows (fragments.cuh): of 64 lines its warp has every fourth 16.
#pragma once

#include <type_traits>

#include "tile_mma_swapped.cuh"
#include "wgmma_config.cuh"

namespace tree_attention::cuda {

// d [64, n] += a [64, 16] b [16, n].
template <typename Element, bool kTransposedA, int kCount>
__device__ __forceinline__ void wgmma(float (&d)[kCount], uint64_t a, uint64_t b) {
  if constexpr (std::is_same_v<Element, BFloat16>) {
    wgmma_m64k16_bf16<kTransposedA>(d, a, b);
  } else {
    wgmma_m64k16_f16<kTransposedA>(d, a, b);
  }
}

// The descriptor of a matrix that lies `bytes` further on in the same memory.
__device__ __forceinline__ uint64_t moved(uint64_t descriptor, int bytes) {
  return descriptor + (bytes >> 4);
}

template <typename Config, typename Element>
class TileWgmma {
 public:
  static constexpr int kRowBlocks = Config::kRows / 8;  // of eight rows
  using Scores = float[4 * kRowBlocks];

  // What these names mean is said in WarpTile.
  __device__ float product_unit(int) const { return 1.0f; }

  __device__ void clear() {
#pragma unroll
    for (auto& box : o_) {
      for (float& o : box) o = 0.0f;
    }
  }

  // s [64 keys, rows] = k q^T, with the shared addresses of the tile's keys and of the queries.
  __device__ void score_tile(Scores& s, uint32_t keys, uint32_t queries) const {
    const uint64_t k = matrix_descriptor(keys), q = matrix_descriptor(queries);
#pragma unroll
    for (float& score : s) score = 0.0f;
    wgmma_pin(s);
    wgmma_fence();
#pragma unroll
    for (int box = 0; box < Config::kKeyBoxes; ++box) {
#pragma unroll
      for (int column = 0; column < Config::kBoxColumns; column += 16) {
        wgmma<Element, false>(s, moved(k, box * Config::kBoxBytes + 2 * column),
                              moved(q, box * Config::kQueryBoxBytes + 2 * column));
      }
    }
    wgmma_commit_group();
    // Without this: scores are read before they are there.
    wgmma_wait_group<0>();
    wgmma_pin(s);
  }

  // o [columns, rows] += v^T p, with the shared addresses of the tile's values and of the weights,
  // [rows, 64 keys].
  __device__ void value_tile(uint32_t values, uint32_t weights) {
    const uint64_t v = matrix_descriptor(values), p = matrix_descriptor(weights);
    wgmma_fence();
#pragma unroll
    for (int key = 0; key < Config::kTileKeys; key += 16) {
#pragma unroll
      for (int box = 0; box < Config::kValueBoxes; ++box) {
        wgmma<Element, true>(o_[box], moved(v, box * Config::kBoxBytes + key * kBoxRowBytes),
                             moved(p, 2 * key));
      }
    }
    wgmma_commit_group();
    // Without this: o is read before it is there, and a stage is filled while products read it.
    wgmma_wait_group<0>();
#pragma unroll
    for (auto& box : o_) wgmma_pin(box);
  }

  // Multiplies o by the factor of each of the thread's rows, two in each block of eight.
  __device__ void rescale(const float (&factor)[kRowBlocks][2]) {
#pragma unroll
    for (auto& box : o_) {
#pragma unroll
      for (int i = 0; i < 4 * kRowBlocks; ++i) box[i] *= factor[i / 4][i % 2];
    }
  }

  // Calls store(column, i, o) for each column that the thread has of its rows i = 0 and 1 in a
  // block of eight.
  template <typename Store>
  __device__ __forceinline__ void for_each_column(int block, Store store) const {
    const int first = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
#pragma unroll
    for (int box = 0; box < Config::kValueBoxes; ++box) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const int column = Config::kBoxColumns * box + first + 8 * KeysByRows::key_of(c);
        store(column, KeysByRows::row_of(c), o_[box][4 * block + c]);
      }
    }
  }

 private:
  float o_[Config::kValueBoxes][4 * kRowBlocks];
};

}  // namespace tree_attention::cuda
