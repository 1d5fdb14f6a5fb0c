// SPDX-License-Identifier: BSD-3-Clause
//
// The canonical order of softmax_state.h for a thread that merges in registers.
#pragma once

#include <bit>

#include "common/softmax_state.h"
#include "cuda/device.h"

namespace tree_attention::cuda {

// The state of a row, with kColumns columns of its o.
template <int kColumns>
struct RowState {
  float o[kColumns];
  float lse;

  __device__ void merge_with(const RowState& upper) {
    const Merge merged = merge(lse, upper.lse);
    lse = merged.lse;
#pragma unroll
    for (int i = 0; i < kColumns; ++i) o[i] = merged(o[i], upper.o[i]);
  }
};

// The number of parts in a chunk: a thread loads them all before it merges the first two.
constexpr int kPartsInFlight = 8;

template <typename State>
struct LoadedParts {
  // They begin as zeros, which are never merged: registers that are written only under a condition
  // would count as used from the kernel's beginning.
  State states[kPartsInFlight] = {};

  // Loads the parts from `first` on, a multiple of kPartsInFlight, as far as there are any;
  // load(i) is the state of part i.
  template <typename Index, typename Load>
  __device__ __forceinline__ void load(Index first, Index num_parts, const Load& load) {
#pragma unroll
    for (int i = 0; i < kPartsInFlight; ++i) {
      if (first + i < num_parts) states[i] = load(first + i);
    }
  }

  // Merges these parts, at least one; merge(a, b, i) merges b, the state of the parts from i on,
  // into a.
  template <typename Index, typename MergeInto>
  __device__ __forceinline__ const State& merge_all(Index first, Index num_parts,
                                                    const MergeInto& merge) {
#pragma unroll
    for (int step = 1; step < kPartsInFlight; step *= 2) {
#pragma unroll
      for (int i = 0; i + step < kPartsInFlight; i += 2 * step) {
        if (first + i + step < num_parts) merge(states[i], states[i + step], first + i + step);
      }
    }
    return states[0];
  }
};

// The most merged chunks that wait for their right neighbours.
template <unsigned kMaxParts>
constexpr int kMaxWaitingChunks =
    std::bit_width((kMaxParts + kPartsInFlight - 1) / kPartsInFlight) - 1;

// Merges parts [0, num_parts), at least one and at most kMaxParts; merge_chunk(first) is the merge
// of the chunk from `first` on, and merge(a, b, i) as above. The stack of merged chunks is shifted,
// not indexed, so that it stays in registers; one copy of a merge does for all its levels.
template <int kMaxParts, typename State, typename MergeChunk, typename MergeInto>
__device__ __forceinline__ State merge_parts(int num_parts, const MergeChunk& merge_chunk,
                                             const MergeInto& merge) {
  constexpr int kMost = kMaxWaitingChunks<kMaxParts>;
  static_assert(kMost > 0);
  State waiting[kMost];  // the last one first
  State merged;
#pragma unroll 1
  for (int chunk = 0, first = 0; first < num_parts; ++chunk, first += kPartsInFlight) {
    merged = merge_chunk(first);
    const bool is_last = first + kPartsInFlight >= num_parts;
    // `merged` begins with chunk `begin`. It merges with left neighbours of as many chunks, and at
    // the end with all; `begin` without its lowest bit is where the neighbour begins.
    int begin = chunk;
#pragma unroll 1
    for (int size = 1; is_last ? begin != 0 : (begin & size) != 0; size *= 2) {
      merge(waiting[0], merged, begin * kPartsInFlight);
      merged = waiting[0];
      begin &= begin - 1;
#pragma unroll
      for (int i = 0; i + 1 < kMost; ++i) waiting[i] = waiting[i + 1];
    }
#pragma unroll
    for (int i = kMost - 1; i > 0; --i) waiting[i] = waiting[i - 1];
    waiting[0] = merged;
  }
  return merged;
}

}  // namespace tree_attention::cuda
