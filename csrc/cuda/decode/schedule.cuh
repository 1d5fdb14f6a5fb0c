// SPDX-License-Identifier: BSD-3-Clause
//
// The lean schedule on the device: every block finds its own range of the line from the key ranges,
// so that no host value is needed and key ranges may change between replays of a CUDA graph.
//
// The line has the outputs in the order (sequence, block of rows, kv head). An output takes
// kOverheadTiles positions and then one for each of its tiles.
#pragma once

#include "common/partition.h"
#include "units.cuh"

namespace tree_attention::cuda {

// What an output costs beyond its keys, in tiles: its queries, the merge of its warps, its store.
constexpr int kOverheadTiles = 1;

// Fewer tiles per block cost more in partial states than more blocks gain.
constexpr int kMinWorkerTiles = 2;

// What a block knows of its range of the line. It is kept in shared memory, because it is read only
// once per output.
struct BlockRange {
  static constexpr int kTableUnits = 32;

  Partition partition;       // of the whole line
  int64_t begin;             // the range's first position on the line
  int64_t first_unit_begin;  // position of the unit that holds it
  int32_t first_unit;        // number of that unit
  int32_t length;            // positions in the range
  Keys keys[kTableUnits];    // of the units from first_unit on
};

template <typename Config>
struct ScheduleMemory {
  BlockRange range;
  int64_t warp_sums[Config::kWarps];
};

struct Sums {
  int64_t inclusive;  // over the threads up to this one
  int64_t total;      // over all threads of the block
};

// To be called by all threads. `warp_sums` is shared memory.
template <int kThreads>
__device__ Sums sum_over_threads(int64_t value, int64_t* warp_sums) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int64_t lower = __shfl_up_sync(0xffffffff, value, distance);
    if (lane >= distance) value += lower;
  }
  if (lane == 31) warp_sums[warp] = value;
  __syncthreads();
  Sums sums{value, 0};
#pragma unroll
  for (int i = 0; i < kThreads / 32; ++i) {
    const int64_t sum = warp_sums[i];
    if (i < warp) sums.inclusive += sum;
    sums.total += sum;
  }
  __syncthreads();  // before the next call's writes
  return sums;
}

// A chunk is a run of units, one for each thread of a block. Positions count from where the chunk
// begins on the line.
struct Chunk {
  int64_t unit_begin, unit_end;  // of this thread's unit; equal if there is none
  int64_t length;
};

// To be called by all threads.
template <typename Config>
__device__ Chunk measure_chunk(const Units<Config>& units, int first_unit, int num_heads_kv,
                               int64_t* warp_sums) {
  const int unit = first_unit + threadIdx.x;
  int64_t length = 0;
  if (unit < units.count()) {
    length = int64_t{num_heads_kv} * (kOverheadTiles + units.num_tiles(units.keys(unit)));
  }
  const Sums sums = sum_over_threads<Config::kThreads>(length, warp_sums);
  return {sums.inclusive - length, sums.inclusive, sums.total};
}

// Cuts the line into equal ranges and writes this block's to `memory`; returns whether there is one
// for it. To be called by all threads.
template <typename Config>
__device__ bool cut_line(const LaunchParams& params, ScheduleMemory<Config>& memory) {
  const DecodeParams& p = params.decode;
  const Units<Config> units(params);
  const int num_units = units.count();
  const auto measure = [&](int first_unit) {
    return measure_chunk(units, first_unit, p.num_heads_kv, memory.warp_sums);
  };

  Chunk chunk{};
  int64_t length = 0;
  for (int first = 0; first < num_units; first += Config::kThreads) {
    chunk = measure(first);
    length += chunk.length;
  }
  const int64_t most =
      p.num_workers > 0 ? length : (length + kMinWorkerTiles - 1) / kMinWorkerTiles;
  const Partition partition{length, min(most, int64_t{gridDim.x})};
  if (blockIdx.x >= partition.num_workers) return false;

  const int64_t begin = partition.begin(blockIdx.x);
  int64_t chunk_begin = 0;
  for (int first = 0; chunk_begin <= begin; first += Config::kThreads) {
    if (num_units > Config::kThreads) chunk = measure(first);  // else it is the only one
    const int64_t unit_begin = chunk_begin + chunk.unit_begin;
    if (unit_begin <= begin && begin < chunk_begin + chunk.unit_end) {
      BlockRange& range = memory.range;
      range.partition = partition;
      range.begin = begin;
      range.first_unit_begin = unit_begin;
      range.first_unit = first + threadIdx.x;
      range.length = static_cast<int>(partition.begin(blockIdx.x + 1) - begin);
    }
    chunk_begin += chunk.length;
  }
  __syncthreads();
  const int unit = memory.range.first_unit + threadIdx.x;
  if (threadIdx.x < BlockRange::kTableUnits && unit < num_units) {
    memory.range.keys[threadIdx.x] = units.keys(unit);
  }
  __syncthreads();
  return true;
}

}  // namespace tree_attention::cuda
