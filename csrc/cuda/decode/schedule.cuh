// SPDX-License-Identifier: BSD-3-Clause
//
// The lean schedule on the device: every block finds its own range of the line from the key ranges,
// so that no host value is needed and key ranges may change between replays of a CUDA graph.
//
// The line has the outputs in the order (block of rows, sequence, kv head). An output takes
// kOverheadTiles positions and then one for each of its tiles. Where several blocks of rows read
// the same keys, each has an equal part of the line, and with a multiple of them as workers
// (plan.cu) the ranges of different blocks begin at the same keys: their workers read them at the
// same time, once from DRAM. A worker with several blocks of rows of the same keys would come back
// to them when the L2 has long had others.
#pragma once

#include "common/partition.h"
#include "units.cuh"

namespace tree_attention::cuda {

// What an output costs beyond its keys, in tiles: its queries, the merge of its warps, its store.
constexpr int kOverheadTiles = 1;

// Fewer tiles per block cost more in partial states than more blocks gain.
constexpr int kMinWorkerTiles = 2;

// What a block knows of its worker's range of the line. It is kept in shared memory, because it is
// read only once per output.
struct BlockRange {
  static constexpr int kMaxKeys = 32;

  Partition partition;     // of the whole line
  int64_t begin;           // the range's first position on the line
  int32_t length;          // positions in the range
  int32_t first_unit;      // number of the unit that holds the first position
  int32_t first_head;      // the kv head of that unit's output there
  int32_t first_position;  // where that output begins, from where the range begins: 0 or less
  int32_t keys_unit, num_keys;
  Keys keys[kMaxKeys];  // of num_keys units from keys_unit on
};

template <typename Config>
struct ScheduleMemory {
  BlockRange range;
  Contributors contributors;  // of the current output, where blocks share it
  int32_t warp_sums[Config::kWarps];
};

// A worker is a cluster of neighbouring blocks (cluster.cuh), or one block.
constexpr int kMaxClusterBits = 3;  // eight blocks are the most that every device takes
template <typename Config>
constexpr bool kFormsClusters = kHasClusters && Config::kFormsClusters;

template <typename Config>
__device__ __forceinline__ int cluster_bits(const LaunchParams& params) {
  return kFormsClusters<Config> ? params.cluster_bits : 0;
}
template <typename Config>
__device__ __forceinline__ int cluster_size(const LaunchParams& params) {
  return 1 << cluster_bits<Config>(params);
}
template <typename Config>
__device__ __forceinline__ int worker_of_block(const LaunchParams& params) {
  return blockIdx.x >> cluster_bits<Config>(params);
}
template <typename Config>
__device__ __forceinline__ int rank_in_cluster(const LaunchParams& params) {
  return blockIdx.x & (cluster_size<Config>(params) - 1);
}

struct Sums {
  int inclusive;  // over the threads up to this one
  int total;      // over all threads of the block
};

// To be called by all threads. `warp_sums` is shared memory, which this reads after a barrier.
template <int kThreads>
__device__ Sums sum_over_threads(int value, int32_t* warp_sums) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int lower = __shfl_up_sync(0xffffffff, value, distance);
    if (lane >= distance) value += lower;
  }
  if (lane == 31) warp_sums[warp] = value;
  // Without this: warps add sums that are not there.
  __syncthreads();
  Sums sums{value, 0};
#pragma unroll
  for (int i = 0; i < kThreads / 32; ++i) {
    const int sum = warp_sums[i];
    if (i < warp) sums.inclusive += sum;
    sums.total += sum;
  }
  return sums;
}

// The cut of a line of `length` positions, of so many outputs, among at most `max_workers` of
// 2^cluster_bits blocks each; `asked` is the caller's number of workers, 0 for none. Clusters get
// as many tiles for each of their blocks as single blocks do, or a whole output: what is cut more
// finely has parts to merge, for which most of the blocks had no tiles.
TREE_ATTENTION_HOST_DEVICE Partition partition_of_line(int64_t length, int64_t num_outputs,
                                                       int64_t asked, int64_t max_workers,
                                                       int cluster_bits) {
  const int64_t blocks = (length + kMinWorkerTiles - 1) / kMinWorkerTiles;
  const int64_t clusters = (blocks + (1 << cluster_bits) - 1) >> cluster_bits;
  const int64_t whole = num_outputs < blocks ? num_outputs : blocks;
  const int64_t most = asked > 0 ? length : clusters > whole ? clusters : whole;
  return {length, most < max_workers ? most : max_workers};
}

// Partition::owner without its division, of up to 2^14 workers: an estimate, which three roundings
// put off by one at most, and two looks at the exact cut.
TREE_ATTENTION_HOST_DEVICE int64_t owner_of(const Partition& partition, int64_t tile) {
  const int64_t end = (tile + 1) * partition.num_workers;
  const auto begins_before = [&](int64_t worker) { return worker * partition.num_tiles < end; };
  const float workers = static_cast<float>(partition.num_workers);
  const int worker = static_cast<int>(static_cast<float>(tile) *
                                      (workers / static_cast<float>(partition.num_tiles)));
  if (!begins_before(worker)) return worker - 1;
  return worker + begins_before(worker + 1);
}

// Where a block's range lies.
struct Cut {
  Partition partition;
  int64_t begin, end;
  int unit, head_kv;
  int position;  // as BlockRange::first_position

  __device__ void write(int num_units, BlockRange& range) const {
    range.partition = partition;
    range.begin = begin;
    range.length = static_cast<int>(end - begin);
    range.first_unit = unit;
    range.first_head = head_kv;
    range.first_position = position;
    range.keys_unit = num_units > BlockRange::kMaxKeys ? unit : 0;
    range.num_keys = min(num_units - range.keys_unit, BlockRange::kMaxKeys);
  }
};

// The range of a worker where the host knows the line. Nothing is divided.
__device__ __forceinline__ Cut cut_uniform_line(const UniformLine& line, int worker,
                                                int64_t num_outputs) {
  const auto begin_of = [&](uint32_t worker) {
    return worker * line.quotient + line.workers.quotient(worker * line.remainder);
  };
  const uint32_t begin = begin_of(worker), output = line.output.quotient(begin);
  const uint32_t unit = line.heads.quotient(output);
  return {{num_outputs * line.output_length, line.workers.divisor},
          begin,
          begin_of(worker + 1),
          static_cast<int>(unit),
          static_cast<int>(output - unit * line.heads.divisor),
          static_cast<int>(output * line.output_length - begin)};
}

// Cuts the line into equal ranges and writes the range of this block's worker to `memory`. Returns
// whether there is a range for it. To be called by all threads.
template <typename Config>
__device__ bool cut_line(const LaunchParams& params, ScheduleMemory<Config>& memory) {
  const DecodeParams& p = params.decode;
  BlockRange& range = memory.range;
  const Units<Config> units(params);
  const int num_units = units.count();
  const int worker = worker_of_block<Config>(params);

  // With more rows the first request is a smaller part of the time, and registers are scarcer.
  if constexpr (Config::kRows <= 16) {
    if (params.line.output_length > 0) {
      if (worker >= static_cast<int>(params.line.workers.divisor)) return false;
      const Cut cut = cut_uniform_line(params.line, worker, int64_t{num_units} * p.num_heads_kv);
      if (threadIdx.x < BlockRange::kMaxKeys) {
        range.keys[threadIdx.x] = {0, static_cast<int>(p.seqlen_k), false};
      }
      if (threadIdx.x == 0) cut.write(num_units, range);
      // Without this: the range that the host knows is read before it is written.
      __syncthreads();
      return true;
    }
  }

  // Every thread measures a run of units: the outputs of one kv head, which the others have, too.
  const int num_of_thread = (num_units + Config::kThreads - 1) / Config::kThreads;
  const int thread_begin = threadIdx.x * num_of_thread;
  const int thread_end = min(num_units, thread_begin + num_of_thread);
  int thread_length = 0;
  int output_length = 0;  // of the run's last unit
  for (int unit = thread_begin; unit < thread_end; ++unit) {
    const Keys keys = units.keys(unit);
    if (unit < BlockRange::kMaxKeys) range.keys[unit] = keys;
    output_length = kOverheadTiles + units.num_tiles(keys);
    thread_length += output_length;
  }
  const Sums sums = sum_over_threads<Config::kThreads>(thread_length, memory.warp_sums);

  const int64_t heads = p.num_heads_kv;
  const int bits = cluster_bits<Config>(params);
  const Partition partition = partition_of_line(heads * sums.total, heads * num_units,
                                                p.num_workers, gridDim.x >> bits, bits);
  if (worker >= partition.num_workers) return false;

  // Divisions take long: two lanes make one each.
  const int64_t cut = partition.begin(worker + threadIdx.x % 2);
  const int64_t begin = __shfl_sync(0xffffffff, cut, 0), end = __shfl_sync(0xffffffff, cut, 1);
  if (heads * (sums.inclusive - thread_length) <= begin && begin < heads * sums.inclusive) {
    int unit = thread_end - 1;
    int64_t unit_begin = heads * (sums.inclusive - output_length);
    while (begin < unit_begin) {
      output_length = kOverheadTiles + units.num_tiles(units.keys(--unit));
      unit_begin -= heads * output_length;
    }
    const int64_t offset = begin - unit_begin, head_kv = offset / output_length;
    const int position = static_cast<int>(head_kv * output_length - offset);
    Cut{partition, begin, end, unit, static_cast<int>(head_kv), position}.write(num_units, range);
  }
  // Without this: the block's range is read before it is known.
  __syncthreads();
  if (num_units > BlockRange::kMaxKeys) {
    for (int i = threadIdx.x; i < range.num_keys; i += Config::kThreads) {
      range.keys[i] = units.keys(range.keys_unit + i);
    }
    // Without this: key ranges are read before they are there.
    __syncthreads();
  }
  return true;
}

}  // namespace tree_attention::cuda
