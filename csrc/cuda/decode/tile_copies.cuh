// SPDX-License-Identifier: BSD-3-Clause
//
// Which thread copies which piece of a tile to shared memory. The threads of a key group copy the
// rows that their own warps read, so that a key group waits for nobody else; neighbouring threads
// copy neighbouring pieces.
#pragma once

#include "units.cuh"

namespace tree_attention::cuda {

// A barrier of the threads that copy the same keys.
template <typename Config>
__device__ void sync_key_group() {
  if constexpr (Config::kRowGroups == 1) {
    __syncwarp();
  } else {
    __syncthreads();
  }
}

// Every row is `kPieces` copies.
template <typename Config_, int kPieces>
struct TileCopies {
  using Config = Config_;
  static constexpr int kThreads = 32 * Config::kRowGroups;  // of a key group

  // Copies of one thread for a tile, of which some threads may lack the last.
  static constexpr int kOfGroup = Config::kGroupKeys * kPieces;
  static constexpr int kCount = (kOfGroup + kThreads - 1) / kThreads;

  // Consecutive copies of a thread that are of the same row.
  static constexpr int kOfRow = kPieces % kThreads == 0 ? kPieces / kThreads : 1;

  // Whether this thread has copy i, and the row of the tile and the piece of the row that it is.
  static __device__ bool exists(int i) { return kOfGroup % kThreads == 0 || index(i) < kOfGroup; }
  static __device__ int row(int i) {
    return threadIdx.x / kThreads * Config::kGroupKeys + index(i) / kPieces;
  }
  static __device__ int piece(int i) { return index(i) % kPieces; }

 private:
  static __device__ int index(int i) { return threadIdx.x % kThreads + i * kThreads; }
};

// The chunks of 16 bytes of the keys, or of the values.
template <typename Config>
using ChunkCopies = TileCopies<Config, Config::CachedRows::kChunks>;

// The scales of the keys, or of the values.
template <typename Config>
using ScaleCopies = TileCopies<Config, 1>;

// Which of this thread's copies are of keys that some row sees, a bit for each. Other keys become
// zero in shared memory and are not read: whatever lies there, NaN too, would reach o through a
// weight of zero, and their pages need not exist.
template <typename Copies>
struct SeenCopies {
  using Config = typename Copies::Config;
  static constexpr uint32_t kAll = 0xffffffff;
  static_assert(Copies::kCount <= 32);

  uint32_t bits;

  __device__ bool operator[](int i) const { return bits >> i & 1; }
  __device__ bool all() const { return bits == kAll; }

  // The copies of the tile that begins with `first_key`.
  static __device__ SeenCopies of_tile(const LaunchParams& params, const OutputRows& rows,
                                       const Keys& keys, int first_key) {
    if (!keys.has_gaps && first_key + Config::kTileKeys <= keys.end) return {kAll};
    uint32_t bits = 0;
#pragma unroll 1
    for (int i = 0; i < Copies::kCount; ++i) {
      const int key = first_key + Copies::row(i);
      const bool seen =
          key < keys.end && (!keys.has_gaps || Units<Config>::is_seen(params, rows, key));
      if (seen) bits |= 1u << i;
    }
    return {bits};
  }
};

}  // namespace tree_attention::cuda
