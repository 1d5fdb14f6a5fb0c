// SPDX-License-Identifier: BSD-3-Clause
//
// Which thread copies which piece of a tile to shared memory. A copy moves one chunk of 16 bytes.
// The threads of a key group copy the rows that their own warps read, so that a key group waits for
// nobody else; neighbouring threads copy neighbouring chunks.
#pragma once

#include "units.cuh"

namespace tree_attention::cuda {

template <typename Config>
struct TileCopies {
  static constexpr int kThreads = 32 * Config::kRowGroups;  // of a key group

  // Copies of one thread for the K of a tile, and again for its V.
  static constexpr int kCount = Config::kGroupKeys * Config::kChunks / kThreads;
  static_assert(Config::kGroupKeys * Config::kChunks % kThreads == 0);

  // Consecutive copies of a thread that are of the same row.
  static constexpr int kOfRow = Config::kChunks % kThreads == 0 ? Config::kChunks / kThreads : 1;

  // Row of the tile and chunk of the row that are copy i of this thread.
  static __device__ int row(int i) {
    const int index = threadIdx.x % kThreads + i * kThreads;
    return threadIdx.x / kThreads * Config::kGroupKeys + index / Config::kChunks;
  }
  static __device__ int chunk(int i) {
    return (threadIdx.x % kThreads + i * kThreads) % Config::kChunks;
  }

  // A barrier of the threads that copy the same keys.
  static __device__ void sync() {
    if constexpr (Config::kRowGroups == 1) {
      __syncwarp();
    } else {
      __syncthreads();
    }
  }
};

// Which of this thread's copies are of keys that some row sees, a bit for each. Other keys become
// zero in shared memory and are not read: whatever lies there, NaN too, would reach o through a
// weight of zero, and their pages need not exist.
template <typename Config>
struct SeenCopies {
  using Copies = TileCopies<Config>;
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
