// SPDX-License-Identifier: BSD-3-Clause
//
// What a warp holds of a tile whatever multiplies it (tile_mma.cuh, tile_mma_8_bits.cuh, the same
// of 8 rows, tile_fma.cuh): the queries of its packed rows and their o. A thread has two of the
// rows, index 0 and 1 below, of scores and of o alike: o[n] are two columns of both, in the places
// that two keys of both have in a block of scores (fragments.cuh).
#pragma once

#include "tile_copies.cuh"

namespace tree_attention::cuda {

// `Tile` is the class that derives from this one. It defines
//   load_query(q, i)    piece i of the queries' columns that the warp multiplies; not where they
//                       stay in memory
//   kParts              the runs of neighbouring columns that a thread has of each row in 32
//   part(first, i, row)  part i of those 32 columns that begin with column `first`
//   column_of_part(i)   where it begins
//   kOutputScale        what o is multiplied by when it is stored
template <typename Config, typename Tile>
class WarpTile {
 public:
  // The queries at `queries` may be overwritten afterwards only if they are kept in registers.
  __device__ void load_queries(const char* queries, int row_group) {
    queries_ = queries;
    first_row_ = Config::kWarpRows * row_group;
    if constexpr (Config::kQueriesInRegisters) {
#pragma unroll
      for (int i = 0; i < Config::kWarpPieces; ++i) tile().load_query(q_[i], i);
    }
  }

  // What the products of the thread's row `i` are multiples of, a power of two.
  __device__ float product_unit(int) const { return 1.0f; }

  __device__ void clear() { clear(o_); }

  __device__ void rescale(const float (&factor)[2]) {
#pragma unroll
    for (int n = 0; n < kOutputBlocks; ++n) {
      for (int c = 0; c < 4; ++c) o_[n][c] *= factor[Fragments::row_of(c)];
    }
  }

  // Calls store(i, row, o) for each part of each row that the thread has in 32 columns from
  // `begin`, a constant.
  template <typename Store>
  __device__ __forceinline__ void for_each_part(int begin, Store store) const {
#pragma unroll
    for (int i = 0; i < Tile::kParts; ++i) {
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        auto part = tile().part(begin, i, row);
        for (float& o : part.value) o *= Tile::kOutputScale;
        store(i, row, part);
      }
    }
  }

 protected:
  using Fragments = typename Config::Fragments;
  static constexpr int kColumns = Config::kWarpColumns;
  static constexpr int kOutputBlocks = kColumns / Fragments::kBlockKeys;
  static constexpr int kQueryRegisters = Fragments::kRows / 4;  // of 16 columns
  static constexpr int kChunkStep = 2 * Config::kPieceStep;     // of 16 bits, from piece to piece

  // The first chunk of 16 bits that the warp multiplies. If the column groups take pieces in turn,
  // it is the first chunk of the warp's group.
  static __device__ int first_chunk() {
    if constexpr (Config::kPieceStep == 1) return 0;
    return 2 * WarpGroups<Config>().column;
  }

  template <int kBlocks>
  static __device__ void clear(float (&blocks)[kBlocks][4]) {
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
      for (int c = 0; c < 4; ++c) blocks[n][c] = 0.0f;
    }
  }

  // Piece i of the queries' columns that the warp multiplies, from wherever they are.
  __device__ void get_query(uint32_t (&q)[kQueryRegisters], int i) const {
    if constexpr (Config::kQueriesInRegisters) {
      for (int c = 0; c < kQueryRegisters; ++c) q[c] = q_[i][c];
    } else {
      tile().load_query(q, i);
    }
  }

  const char* queries_;
  int first_row_;  // of the warp
  uint32_t q_[Config::kQueriesInRegisters ? Config::kWarpPieces : 1][kQueryRegisters];
  float o_[kOutputBlocks][4];

 private:
  __device__ const Tile& tile() const { return static_cast<const Tile&>(*this); }
};

}  // namespace tree_attention::cuda
