// SPDX-License-Identifier: BSD-3-Clause
//
// LeanAttention's fix-up as published: the block with an output's first tile waits for the others
// and merges alone. It hangs where blocks that share an output are not resident at the same time.
#pragma once

#include "cuda/decode/lean_decode.cuh"

namespace tree_attention::cuda {

#if defined(__CUDACC__)  // the emulator has its own
// PTX ISA 9.0, 9.7.9.8 (ld.acquire), for a wait on another block.
__device__ __forceinline__ uint32_t load_acquire(const uint32_t* address) {
  uint32_t value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}
#endif

}  // namespace tree_attention::cuda

namespace tree_attention::ablations {

using namespace cuda;

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
    merge_step<kThreads>(states, workers, step, num_rows, scratch, sink);
  };
  if (workers.count <= kMaxMergedParts) return merge({0, 1, workers.count, true});
  for (int64_t first = 0; first < workers.count; first += kRadix) {
    const int64_t left = workers.count - first;
    if (left > 1) merge({first, 1, left < kRadix ? left : kRadix, false});
  }
  merge({0, kRadix, (workers.count - 1) / kRadix + 1, true});
}

// lean_decode_kernel with this fix-up. Grid, block and shared memory are the same.
template <typename Element, typename Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    waiting_fixup_kernel(const __grid_constant__ LaunchParams params) {
  char* shared = dynamic_shared_memory();
  auto& schedule = *reinterpret_cast<ScheduleMemory<Config>*>(shared + Config::kSchedule);
  if (!cut_line(params, schedule)) return;
  const int head_dim_v = params.decode.head_dim_v;

  Loader<Element, Config> loader(params, OutputCursor<Config>(params, schedule.range), shared);
  Ring<Config> ring(params, shared);
  TileOf<Element, Config> tile;
  OnlineSoftmax<Config> softmax;
  int number = 0;
  for (OutputCursor<Config> output(params, schedule.range); !output.done(); output.next()) {
    const OutputRows rows = output.rows();
    const OutputSink sink(params, rows);
    if (output.num_tiles() == 0 && output.owns_first()) {
      store_empty<Config>(rows, head_dim_v, sink);
    }
    const int num_tiles = output.tile_end() - output.tile_begin();
    if (num_tiles == 0) continue;
    attend(params, output, rows, number++, loader, ring, tile, softmax, [] {});
    if (num_tiles == output.num_tiles()) {
      combine_warps<Config>(tile, softmax, rows, head_dim_v, shared, ring.free_stage(), sink);
      __syncthreads();  // before the stage is filled
      continue;
    }
    const PartialStates states(params.workspace.partials, Config::kRows, head_dim_v);
    const Contributors blocks = output.contributors();
    const int64_t slot = partial_slot(blocks, blockIdx.x - blocks.first);
    combine_warps<Config>(tile, softmax, rows, head_dim_v, shared, ring.free_stage(),
                          states.sink(slot));
    wait_and_complete_output<Config::kThreads>(params.workspace.counters, states, blocks,
                                               rows.count, shared + Config::kScratch, sink);
  }
}

}  // namespace tree_attention::ablations
