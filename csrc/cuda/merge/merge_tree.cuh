// SPDX-License-Identifier: BSD-3-Clause
//
// The canonical order of softmax_state.h for a thread that merges in registers.
#pragma once

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

  // Merges these parts, of which there is at least one; merge(a, b, i) merges the state b of the
  // parts from i on into a.
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

// Merges parts [0, num_parts), at least one and fewer than kPartsInFlight * 2^kLevels;
// merge_chunk(first) is the merge of the chunk from `first` on. The stack of merged chunks is
// indexed by constants, so that it stays in registers.
template <int kLevels, typename State, typename MergeChunk, typename MergeInto>
__device__ __forceinline__ State merge_parts(int num_parts, const MergeChunk& merge_chunk,
                                             const MergeInto& merge) {
  State merged[kLevels];  // merged[l]: 2^l chunks that wait for their right neighbours
  int num_chunks = 0;
#pragma unroll 1
  for (int first = 0; first < num_parts; first += kPartsInFlight, ++num_chunks) {
    State state = merge_chunk(first);
    bool carries = true;
#pragma unroll
    for (int level = 0; level < kLevels; ++level) {
      const bool waits = num_chunks >> level & 1;
      if (carries && waits) {
        merge(merged[level], state, (num_chunks >> level << level) * kPartsInFlight);
        state = merged[level];
      } else if (carries) {
        merged[level] = state;
        carries = false;
      }
    }
  }
  State result;
  bool any = false;
#pragma unroll
  for (int level = 0; level < kLevels; ++level) {
    if ((num_chunks >> level & 1) == 0) continue;
    if (any) merge(merged[level], result, (num_chunks >> level << level) * kPartsInFlight);
    result = merged[level];
    any = true;
  }
  return result;
}

}  // namespace tree_attention::cuda
