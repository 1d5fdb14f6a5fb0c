// SPDX-License-Identifier: BSD-3-Clause
//
// If column groups split head_dim, each warp multiplies its own columns only: the warps of the same
// rows and keys need the sum.
#pragma once

#include "cuda/element.cuh"
#include "tile_copies.cuh"

namespace tree_attention::cuda {

// Puts the sum of four column groups' products, which place(warp, n) has for this lane, into s. It
// has the same order in all of them, so that they agree about the maximum.
template <typename Config, int kBlocks, typename Place>
__device__ __forceinline__ void sum_of_groups(float (&s)[kBlocks][4], const Place& place) {
  static_assert(Config::kColumnGroups == 4);
  const int first = threadIdx.x / 32 % Config::kRowGroups;
#pragma unroll
  for (int n = 0; n < kBlocks; ++n) {
    Float4 part[4];
#pragma unroll
    for (int g = 0; g < 4; ++g) part[g] = load_float4(place(first + g * Config::kRowGroups, n));
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      s[n][c] = (part[0].value[c] + part[1].value[c]) + (part[2].value[c] + part[3].value[c]);
    }
  }
}

// Adds the products of the other column groups to `s`, in all of them, for one of a tile's
// `kSteps`. To be called by all threads, whether or not the warp `has_rows`. The products pass
// through the scratch memory, which is free after another barrier.
template <typename Config, int kSteps, int kBlocks>
__device__ void add_other_columns(float (&s)[kBlocks][4], int step, bool has_rows) {
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
      store_shared(place(warp, n), Float4{s[n][0], s[n][1], s[n][2], s[n][3]});
    }
  }
  // Without this: products of the other columns are not waited for.
  sync_key_group<Config>();
  if constexpr (Config::kColumnGroups > 2) {
    if (has_rows) sum_of_groups<Config>(s, place);
  } else if (has_rows) {
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
      const Float4 other = load_float4(place(warp ^ Config::kRowGroups, n));
#pragma unroll
      for (int c = 0; c < 4; ++c) s[n][c] += other.value[c];
    }
  }
}

}  // namespace tree_attention::cuda
