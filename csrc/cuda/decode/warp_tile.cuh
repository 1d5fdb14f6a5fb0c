// SPDX-License-Identifier: BSD-3-Clause
//
// What a warp holds of a tile whatever multiplies it (tile_mma.cuh, tile_mma_8_bits.cuh,
// tile_fma.cuh): the queries of its 16 packed rows and their o. With g = lane / 4 and t = lane % 4,
// a thread holds rows g and g + 8 (index 0 and 1 below); scores s[n] are (row 0, keys 8 n + 2 t and
// the next; row 1, the same), and o[n] is (row 0, two columns; row 1, the same).
#pragma once

#include "tile_copies.cuh"

namespace tree_attention::cuda {

// `Tile` is the class that derives from this one. It defines
//   load_query(q, i)    piece i of the queries' columns that the warp multiplies; not where they
//                       stay in memory
//   pair(n, row, half)  the first or second two neighbouring columns of a row that the thread has
//                       among the 16 of o[n] and o[n + 1], n being even
//   column(half)        where they begin
//   kOutputScale        what o is multiplied by when it is stored
template <typename Config, typename Tile>
class WarpTile {
 public:
  // The queries at `queries` may be overwritten afterwards only if they are kept in registers.
  __device__ void load_queries(const char* queries, int row_group) {
    queries_ = queries;
    first_row_ = 16 * row_group;
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
    for (int n = 0; n < kColumns / 8; ++n) {
      for (int c = 0; c < 4; ++c) o_[n][c] *= factor[c / 2];
    }
  }

  // Calls store(i, row, o) for each pair of neighbouring columns that the thread has in 32 columns
  // from `begin`, a constant. Pair i begins at column_of_pair(i).
  template <typename Store>
  __device__ __forceinline__ void for_each_pair(int begin, Store store) const {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        Float2 pair = tile().pair(begin / 8 + i / 2 * 2, row, i % 2);
        for (float& o : pair.value) o *= Tile::kOutputScale;
        store(i, row, pair);
      }
    }
  }

  static constexpr int kPairs = 4;  // in 32 columns of a row

  static __device__ int column_of_pair(int i) { return i / 2 * 16 + Tile::column(i % 2); }

 protected:
  static constexpr int kColumns = Config::kWarpColumns;
  static constexpr int kChunkStep = 2 * Config::kPieceStep;  // of 16 bits, from piece to piece

  // The first chunk of 16 bits that the warp multiplies: where the column groups take pieces in
  // turn, that of its group.
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
  __device__ void get_query(uint32_t (&q)[4], int i) const {
    if constexpr (Config::kQueriesInRegisters) {
      for (int c = 0; c < 4; ++c) q[c] = q_[i][c];
    } else {
      tile().load_query(q, i);
    }
  }

  const char* queries_;
  int first_row_;  // of the warp
  uint32_t q_[Config::kQueriesInRegisters ? Config::kWarpPieces : 1][4];
  float o_[kColumns / 8][4];

 private:
  __device__ const Tile& tile() const { return static_cast<const Tile&>(*this); }
};

}  // namespace tree_attention::cuda
