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

// Merges the chunk of parts from `first` on, a multiple of kPartsInFlight below num_parts. load(i)
// is the state of part i; merge(a, b, i) merges the state b of the parts from i on into a, and
// leaves a as it is if there is no part i.
template <typename Index, typename Load, typename MergeInto>
__device__ __forceinline__ auto merge_chunk(Index first, Index num_parts, const Load& load,
                                            const MergeInto& merge) {
  decltype(load(first)) states[kPartsInFlight];
#pragma unroll
  for (int i = 0; i < kPartsInFlight; ++i) {
    states[i] = load(first + i < num_parts ? first + i : num_parts - 1);
  }
#pragma unroll
  for (int step = 1; step < kPartsInFlight; step *= 2) {
#pragma unroll
    for (int i = 0; i + step < kPartsInFlight; i += 2 * step) {
      merge(states[i], states[i + step], first + i + step);
    }
  }
  return states[0];
}

// Merges parts [0, num_parts), at least one and fewer than kPartsInFlight * 2^kLevels. The stack of
// merged chunks is indexed by constants, so that it stays in registers.
template <int kLevels, typename Load, typename MergeInto>
__device__ __forceinline__ auto merge_parts(int num_parts, const Load& load,
                                            const MergeInto& merge) {
  using State = decltype(load(0));
  State merged[kLevels];  // merged[l]: 2^l chunks that wait for their right neighbours
  int num_chunks = 0;
#pragma unroll 1
  for (int first = 0; first < num_parts; first += kPartsInFlight, ++num_chunks) {
    State chunk = merge_chunk(first, num_parts, load, merge);
    bool carries = true;
#pragma unroll
    for (int level = 0; level < kLevels; ++level) {
      const bool waits = num_chunks >> level & 1;
      if (carries && waits) {
        merge(merged[level], chunk, (num_chunks >> level << level) * kPartsInFlight);
        chunk = merged[level];
      } else if (carries) {
        merged[level] = chunk;
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
