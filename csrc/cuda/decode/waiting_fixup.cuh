// SPDX-License-Identifier: BSD-3-Clause
//
// LeanAttention's fix-up as published, for comparison only: the block with an output's first tile
// waits for the others and merges alone. It hangs where blocks that share an output are not
// resident at the same time.
#pragma once

#include "fixup.cuh"

namespace tree_attention::cuda {

// In the place of complete_output.
template <int kThreads, typename Sink>
__device__ void wait_and_complete_output(uint32_t* counters, const PartialStates& states,
                                         const Contributors& workers, int num_rows, char* scratch,
                                         const Sink& sink) {
  uint32_t* counter = counters + partial_slot(workers, 0);
  __syncthreads();  // all threads have stored
  if (blockIdx.x != workers.first) {
    if (threadIdx.x == 0) atomic_inc_acq_rel(counter, UINT32_MAX);
    return;
  }
  if (threadIdx.x == 0) {
    while (load_acquire(counter) + 1 < workers.count) {
    }
    *counter = 0;
  }
  __syncthreads();
  const auto merge = [&](const MergeStep& step) {
    PartsMerger<kThreads>(states, workers, step, scratch).run(num_rows, sink);
  };
  if (workers.count <= kMaxMergedParts) return merge({0, 1, workers.count, true});
  for (int64_t first = 0; first < workers.count; first += kRadix) {
    const int64_t left = workers.count - first;
    if (left > 1) merge({first, 1, left < kRadix ? left : kRadix, false});
  }
  merge({0, kRadix, (workers.count - 1) / kRadix + 1, true});
}

}  // namespace tree_attention::cuda
