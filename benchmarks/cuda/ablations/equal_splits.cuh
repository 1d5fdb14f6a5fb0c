// SPDX-License-Identifier: BSD-3-Clause
//
// FlashDecoding's schedule: each output has blocks of its own, with equal splits of its tiles, and
// a second kernel merges them.
#pragma once

#include "cuda/decode/lean_decode.cuh"

namespace tree_attention::ablations {

using namespace cuda;

struct SplitParams {
  LaunchParams launch;
  int max_splits;  // of an output, and the number of its blocks
};

template <typename Config>
__device__ int num_splits(const Units<Config>& units, int unit, int max_splits) {
  return max(1, min(units.num_tiles(units.keys(unit)), max_splits));
}

// Writes this block's part of its output's place on the line. Returns the number of splits of the
// output, or 0 where none is left for this block. To be called by all threads.
template <typename Config>
__device__ int take_split(const SplitParams& params, BlockRange& range) {
  const int num_heads_kv = params.launch.decode.num_heads_kv;
  const int output = blockIdx.x / params.max_splits, split = blockIdx.x % params.max_splits;
  const int unit = output / num_heads_kv, head_kv = output % num_heads_kv;
  const Units<Config> units(params.launch);
  const Keys keys = units.keys(unit);
  const int64_t tiles = units.num_tiles(keys);
  const int64_t splits = num_splits(units, unit, params.max_splits);
  if (split >= splits) return 0;
  if (threadIdx.x == 0) {
    // The first split also has the output's overhead, so that it owns an output without keys.
    const int64_t begin = split == 0 ? 0 : kOverheadTiles + split * tiles / splits;
    const int64_t end = kOverheadTiles + (split + 1) * tiles / splits;
    range.begin = begin;
    range.length = static_cast<int>(end - begin);
    range.first_unit = unit;
    range.first_head = head_kv;
    range.first_position = -static_cast<int>(begin);
    range.keys_unit = unit;
    range.num_keys = 1;
    range.keys[0] = keys;
  }
  __syncthreads();
  return static_cast<int>(splits);
}

// Grid: max_splits blocks for each output. Block and shared memory: as lean_decode_kernel.
template <typename Element, typename Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    equal_splits_kernel(const __grid_constant__ SplitParams split_params) {
  const LaunchParams& params = split_params.launch;
  char* shared = dynamic_shared_memory();
  BlockRange& range = *reinterpret_cast<BlockRange*>(shared + Config::kSchedule);
  const int splits = take_split<Config>(split_params, range);
  if (splits == 0) return;

  const OutputCursor<Config> output(params, range);
  const OutputRows rows = output.rows();
  const OutputSink sink(params, rows);
  const int head_dim_v = params.decode.head_dim_v;
  if (output.num_tiles() == 0) return store_empty<Config>(rows, head_dim_v, sink);

  Loader<Element, Config> loader(params, OutputCursor<Config>(params, range), shared);
  Ring<Config> ring(params, shared);
  TileOf<Element, Config> tile;
  OnlineSoftmax<Config> softmax;
  attend(params, output, rows, 0, loader, ring, tile, softmax, [] {});
  if (splits == 1) {
    combine_warps<Config>(tile, softmax, rows, head_dim_v, shared, ring.free_stage(), sink);
  } else {
    const PartialStates states(params.workspace.partials, Config::kRows, head_dim_v);
    const bool is_first = blockIdx.x % split_params.max_splits == 0;
    combine_warps<Config>(tile, softmax, rows, head_dim_v, shared, ring.free_stage(),
                          states.sink(partial_slot(blockIdx.x, is_first)));
  }
}

// Grid: a block for each output.
template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    merge_splits_kernel(const __grid_constant__ SplitParams split_params) {
  const LaunchParams& params = split_params.launch;
  const DecodeParams& p = params.decode;
  const Units<Config> units(params);
  const int unit = blockIdx.x / p.num_heads_kv;
  const int splits = num_splits(units, unit, split_params.max_splits);
  if (splits == 1) return;  // stored already
  const OutputRows rows = units.rows(unit, blockIdx.x % p.num_heads_kv);
  const PartialStates states(params.workspace.partials, Config::kRows, p.head_dim_v);
  const Contributors blocks{int64_t{blockIdx.x} * split_params.max_splits, splits};
  merge_step<Config::kThreads>(states, blocks, {0, 1, splits, true}, rows.count,
                               dynamic_shared_memory() + Config::kScratch,
                               OutputSink(params, rows));
}

}  // namespace tree_attention::ablations
