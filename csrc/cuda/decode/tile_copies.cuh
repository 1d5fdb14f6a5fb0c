// SPDX-License-Identifier: BSD-3-Clause
//
// Which thread copies which chunk of a tile to shared memory. The warps of a key group copy the
// keys that they read themselves, so that a key group waits for nobody else; neighbouring threads
// copy neighbouring chunks.
#pragma once

#include <numeric>

#include "units.cuh"

namespace tree_attention::cuda {

// The groups of this thread's warp: the row groups of a column group are neighbours, and so are the
// column groups of a key group.
template <typename Config>
struct WarpGroups {
  const int row = threadIdx.x / 32 % Config::kRowGroups;
  const int column = threadIdx.x / 32 / Config::kRowGroups % Config::kColumnGroups;
  const int key = threadIdx.x / 32 / Config::kGroupWarps;
};

// A barrier of the threads that copy the same keys.
template <typename Config>
__device__ void sync_key_group() {
  if constexpr (Config::kGroupWarps == 1) {
    // Without this: a warp reads what its other threads have not copied.
    __syncwarp();
  } else {
    // Without this: a key group reads what its other warps have not copied.
    __syncthreads();
  }
}

// The copies of 16-byte chunks of a thread, for the keys of a tile or for its values. A warp copies
// neighbouring keys. Its threads come back to the same chunks of a key after kPeriod copies, which
// are kPeriodKeys further on.
template <typename Config>
struct ChunkCopies {
  static constexpr int kKeys = Config::kGroupKeys / Config::kGroupWarps;  // of a warp
  static constexpr int kChunks = Config::CachedRows::kChunks;             // of a key
  static constexpr int kCount = kKeys * kChunks / 32;                     // of a thread
  static constexpr int kPeriod = std::lcm(32, kChunks) / 32;
  static constexpr int kPeriodKeys = 32 * kPeriod / kChunks;
  static_assert(kKeys * kChunks % 32 == 0 && kCount % kPeriod == 0);

  // The warp's first key in the tile; the number among the warp's keys of copy i, and its chunk.
  static __device__ int first_key() { return static_cast<int>(threadIdx.x / 32 * kKeys); }
  static __device__ int key(int i) {
    return static_cast<int>(index(i % kPeriod) / kChunks) + keys_below(i);
  }
  static __device__ int chunk(int i) { return static_cast<int>(index(i % kPeriod) % kChunks); }

  // How many keys copy i is below copy i % kPeriod.
  static constexpr __device__ int keys_below(int i) { return i / kPeriod * kPeriodKeys; }

 private:
  // Quotients of unsigned numbers take fewer instructions.
  static __device__ uint32_t index(int i) { return threadIdx.x % 32 + 32 * i; }
};

// The shared addresses of a thread's copies of keys.
template <typename Config>
class ChunkDestinations {
 public:
  __device__ explicit ChunkDestinations(const char* tile) {
    const uint32_t address = shared_address(tile);
#pragma unroll
    for (int i = 0; i < Copies::kPeriod; ++i) first_[i] = address + offset(i);
  }

  // The destination of copy i, which must be a constant.
  __device__ uint32_t operator[](int i) const {
    return Rows::moved(first_[i % Copies::kPeriod], Copies::keys_below(i), 0);
  }

  static __device__ uint32_t of(const char* tile, int i) {
    return shared_address(tile) + offset(i);
  }

 private:
  using Copies = ChunkCopies<Config>;
  using Rows = typename Config::CachedRows;

  static __device__ uint32_t offset(int i) {
    return Rows::offset(Copies::first_key() + Copies::key(i), Copies::chunk(i));
  }

  uint32_t first_[Copies::kPeriod];
};

// What a warp knows of the keys that it copies: lane l of keys l and l + 32. Where there are fewer
// keys, several lanes know the same.
template <typename Config, typename T>
struct WhatLanesKnow {
  using Copies = ChunkCopies<Config>;
  static constexpr int kCount = (Copies::kKeys + 31) / 32;
  static_assert(kCount <= 2 && (32 % Copies::kKeys == 0 || Copies::kKeys % 32 == 0));

  T value[kCount];

  static __device__ int key(int i) {
    return static_cast<int>(threadIdx.x % 32 % Copies::kKeys) + 32 * i;
  }

  // Whether no lane before this one knows the same.
  static __device__ bool is_first() { return threadIdx.x % 32 < Copies::kKeys; }

  // What is known of the key of copy i. To be called by all lanes.
  __device__ T of_copy(int i) const {
    const T& held = Copies::keys_below(i) < 32 ? value[0] : value[kCount - 1];
    return __shfl_sync(0xffffffff, held, static_cast<uint32_t>(Copies::key(i)) % 32);
  }
};

}  // namespace tree_attention::cuda
