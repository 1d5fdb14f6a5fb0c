// SPDX-License-Identifier: BSD-3-Clause
//
// lean_decode_kernel with a clock: thread 0 of each block notes when it passes the places of its
// way through the kernel.
#pragma once

#include "cuda/decode/lean_decode.cuh"
#include "stamps.h"

namespace tree_attention::cuda {

#if defined(__CUDACC__)  // the emulator has its own
// PTX ISA 9.0, 10 (%clock64): cycles of the multiprocessor.
__device__ __forceinline__ uint64_t clock64_of_multiprocessor() {
  uint64_t cycles;
  asm volatile("mov.u64 %0, %%clock64;" : "=l"(cycles)::"memory");
  return cycles;
}
#endif

}  // namespace tree_attention::cuda

namespace tree_attention::ablations {

using namespace cuda;

struct StampedParams {
  LaunchParams launch;
  BlockStamps* stamps;  // of each block
  int offset;           // in shared memory, where they are kept until the end
};

class Stamper {
 public:
  __device__ Stamper(const StampedParams& params, char* shared)
      : params_(params), stamps_(*reinterpret_cast<BlockStamps*>(shared + params.offset)) {
    static_assert(kEnd < 32, "the first warp clears all");
    if (threadIdx.x <= kEnd) stamps_.places[threadIdx.x] = Stamp{};
    __syncwarp();
  }

  // All threads read the clocks: a branch would take longer.
  __device__ void stamp(int place) const {
    const Stamp now{clock64_of_multiprocessor(), globaltimer()};
    if (threadIdx.x == 0) stamps_.places[place] = now;
  }

  // Stamps a place of the `number`th output of this block.
  __device__ void stamp(int number, PlaceOfOutput place) const {
    if (number < kStampedOutputs) stamp(kFirstOutput + number * kPlacesOfOutput + place);
  }

  __device__ void store() const {
    stamp(kEnd);
    if (threadIdx.x == 0) params_.stamps[blockIdx.x] = stamps_;
  }

 private:
  const StampedParams& params_;
  BlockStamps& stamps_;
};

// A tile takes its queries when the first keys of its output are there.
template <typename Tile>
struct StampedTile : Tile {
  const Stamper& stamper;
  int number = 0;  // of the block's output

  __device__ explicit StampedTile(const Stamper& stamper) : stamper(stamper) {}

  __device__ void load_queries(const char* queries, int row_group) {
    stamper.stamp(number, kArrived);
    Tile::load_queries(queries, row_group);
  }
};

// Grid and block: as lean_decode_kernel. Shared memory: so much more, from `offset` on.
template <typename Element, typename Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    stamped_kernel(const __grid_constant__ StampedParams stamped_params) {
  const LaunchParams& params = stamped_params.launch;
  char* shared = dynamic_shared_memory();
  const Stamper stamper(stamped_params, shared);
  stamper.stamp(kStart);
  griddepcontrol_launch_dependents();
  griddepcontrol_wait();
  stamper.stamp(kWaited);
  auto& schedule = *reinterpret_cast<ScheduleMemory<Config>*>(shared + Config::kSchedule);
  if (!cut_line(params, schedule)) return stamper.store();
  stamper.stamp(kCut);
  const int head_dim_v = params.decode.head_dim_v;

  OutputCursor<Config> output(params, schedule.range);
  Loader<Element, Config> loader(params, output, shared);
  Ring<Config> ring(params, shared);
  StampedTile<TileOf<Element, Config>> tile(stamper);
  OnlineSoftmax<Config> softmax;
  const int worker = worker_of_block<Config>(params);
  for (; !output.done(); output.next()) {
    const OutputRows rows = output.rows();
    const OutputSink sink(params, rows);
    if (output.num_tiles() == 0 && output.owns_first() && rank_in_cluster<Config>(params) == 0) {
      store_empty<Config>(rows, head_dim_v, sink);
    }
    if (!output.worker_has_tiles()) continue;
    const int number = tile.number;
    stamper.stamp(number, kBegun);
    const auto find_contributors = [&] {
      stamper.stamp(number, kRequested);
      if (threadIdx.x == 0 && !output.is_whole()) schedule.contributors = output.contributors();
    };
    const PartialStates states(params.workspace.partials, Config::kRows, head_dim_v);
    const int64_t slot = partial_slot(worker, output.owns_first_tile());
    const StateSink<OutputSink> of_worker{sink, states.sink(slot), output.is_whole()};
    if (output.has_tiles()) {
      attend(params, output, rows, number, loader, ring, tile, softmax, find_contributors);
      stamper.stamp(number, kLooped);
      ++tile.number;
      store_state(params, tile, softmax, rows, shared, ring.free_stage(), of_worker);
    } else {
      find_contributors();
      store_no_state<Config>(shared);
    }
    const bool is_done = merge_cluster<Config>(params, rows, shared, ring.free_stage(), of_worker);
    stamper.stamp(number, kCombined);
    if (is_done) continue;
    // complete_output, whose levels are stamped; a third one has the stamps of the second.
    const Contributors workers = schedule.contributors;
    char* scratch = shared + Config::kScratch;
    bool above = false;
    fix_up(
        workers, worker - workers.first,
        [&](int64_t counter, int64_t expected) {
          const bool is_last = arrive(params.workspace.counters + counter, expected,
                                      reinterpret_cast<bool*>(scratch + kArrivalFlag));
          stamper.stamp(number, above ? kCountedAbove : kCounted);
          return is_last;
        },
        [&](const MergeStep& step) {
          merge_step<Config::kThreads>(states, workers, step, rows.count, scratch, sink);
          stamper.stamp(number, above ? kMergedAbove : kMerged);
          above = true;
        },
        max_merged_parts(rows.count));
  }
  stamper.store();
}

}  // namespace tree_attention::ablations
