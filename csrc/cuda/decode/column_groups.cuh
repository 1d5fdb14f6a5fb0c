// SPDX-License-Identifier: BSD-3-Clause
//
// Where column groups split head_dim, a warp's products are those of its own columns: the warps of
// the same rows and keys need the sum.
#pragma once

#include "cuda/element.cuh"
#include "tile_copies.cuh"

namespace tree_attention::cuda {

// Adds the products of the other column group to `s`, in both, for one of a tile's `kSteps`. To be
// called by all threads, whether or not the warp `has_rows`. The products pass through the scratch
// memory, which is free after another barrier.
template <typename Config, int kSteps, int kBlocks>
__device__ void add_other_columns(float (&s)[kBlocks][4], int step, bool has_rows) {
  static_assert(Config::kColumnGroups == 2);
  // Steps without a barrier between them take buffers in turn.
  constexpr int kBufferBytes = Config::kThreads * static_cast<int>(sizeof(s));
  static_assert((kSteps > 1 ? 2 : 1) * kBufferBytes <= Config::kProductBytes);
  char* const buffer = dynamic_shared_memory() + Config::kScratch + step % 2 * kBufferBytes;
  const auto place = [&](int warp, int n) {
    const int thread = warp * 32 + threadIdx.x % 32;
    return reinterpret_cast<float*>(buffer) + (n * Config::kThreads + thread) * 4;
  };
  const int warp = threadIdx.x / 32;
  if (has_rows) {
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
      store_shared_float4(place(warp, n), {s[n][0], s[n][1], s[n][2], s[n][3]});
    }
  }
  sync_key_group<Config>();
  if (has_rows) {
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
      const Float4 other = load_float4(place(warp ^ Config::kRowGroups, n));
#pragma unroll
      for (int c = 0; c < 4; ++c) s[n][c] += other.value[c];
    }
  }
}

}  // namespace tree_attention::cuda
