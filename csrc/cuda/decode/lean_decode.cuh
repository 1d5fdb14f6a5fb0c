// SPDX-License-Identifier: BSD-3-Clause
//
// The decode kernel: one persistent launch. Each worker, a block or a cluster of blocks, takes an
// equal run of the line of tiles, wherever it begins and ends, streams its keys and values through
// rings in shared memory, and leaves an output that it shares with others to whichever of them
// arrives last.
#pragma once

#include "cluster.cuh"
#include "column_groups.cuh"
#include "combine_warps.cuh"
#include "fixup.cuh"
#include "instances.cuh"
#include "loader.cuh"
#include "output.cuh"
#include "softmax.cuh"
#include "tile_fma.cuh"
#include "tile_mma.cuh"
#include "tile_mma_8_bits.cuh"
#include "tile_mma_swapped.cuh"
#include "tile_mma_swapped_8_bits.cuh"

namespace tree_attention::cuda {

template <typename Element, typename Config>
using TileOf16Rows =
    std::conditional_t<Config::kHasScales, TileMma8Bits<Config, Element>, TileMma<Config, Element>>;
template <typename Element, typename Config>
using TileOf8Rows = std::conditional_t<Config::kHasScales, TileMmaSwapped8Bits<Config, Element>,
                                       TileMmaSwapped<Config, Element>>;
template <typename Element, typename Config>
using TileOf =
    std::conditional_t<sizeof(Element) == 4, TileFma<Config>,
                       std::conditional_t<Config::kWarpRows == 8, TileOf8Rows<Element, Config>,
                                          TileOf16Rows<Element, Config>>>;

// Attends the warp's rows to its keys in the block's tiles of an output, the `number`th output of
// the block: `tile` and `softmax` become their unnormalised state. All threads call
// meanwhile() while the first keys are under way; a barrier follows.
template <typename Element, typename Config, typename Tile, typename Meanwhile>
__device__ void attend(const LaunchParams& params, const OutputCursor<Config>& output,
                       const OutputRows& rows, int number, Loader<Element, Config>& loader,
                       Ring<Config>& ring, Tile& tile, OnlineSoftmax<Config>& softmax,
                       const Meanwhile& meanwhile) {
  using Cached = typename Config::Cached;
  using Fragments = typename Config::Fragments;
  constexpr int kStepKeys =
      Config::kGroupKeys < Tile::kMaxStepKeys ? Config::kGroupKeys : Tile::kMaxStepKeys;
  static_assert(Config::kGroupKeys % kStepKeys == 0);
  constexpr int kSteps = Config::kGroupKeys / kStepKeys;
  constexpr int kBlocks = kStepKeys / Fragments::kBlockKeys;
  const WarpGroups<Config> groups;
  const int first_column = groups.column * Config::kWarpColumns;
  const int first_product = Config::kPieceStep == 1 ? first_column : 0;  // else the tile knows
  const int first_row = groups.row * Config::kWarpRows;
  const bool has_rows = first_row < rows.count;
  const RowScores<Fragments> row_scores(params, rows, output.keys(), first_row);

  tile.clear();
  softmax.clear();
  int last_output = number;  // whose tiles may be requested
  for (int i = output.tile_begin(), end = output.tile_end(); i < end;) {
    ring.wait_for_keys();
    // Without this: a stage is filled that another thread still reads.
    sync_key_group<Config>();
    loader.fill(ring, Config::kFetchesNextOutput ? last_output : number);
    __syncwarp();  // requests may part the lanes, products need them together
    if (last_output == number) {
      // Without this: nobody finds the contributors of an output.
      meanwhile();
      ring.wait_for_keys();
      // Without this: queries are read before all threads have fetched them.
      __syncthreads();
      tile.load_queries(loader.queries(number) + first_product * sizeof(Element), groups.row);
      // Without this: the next queries overwrite these.
      if constexpr (Config::kQuerySlots == 1) __syncthreads();
      ++last_output;
      continue;
    }
#pragma unroll 1  // the code of a step is long
    for (int step = 0; step < kSteps; ++step) {
      const int key = groups.key * Config::kGroupKeys + step * kStepKeys;
      float s[kBlocks][4];
      if (has_rows) tile.score_block(s, ring.keys() + first_product * sizeof(Cached), key);
      if constexpr (Config::kColumnGroups > 1) {
        add_other_columns<Config, kSteps>(s, step, has_rows);
      }
      if (has_rows) {
        const int first_key = output.first_key(i) + key;
        if constexpr (Config::kHasScales) {
          const StepScales<Fragments, kBlocks> of_keys(params.decode.k_scale != nullptr,
                                                       ring.key_scales() + key);
          // Without this: the scales of keys are dropped.
          of_keys.multiply(s);
          const bool hides = row_scores.apply(s, first_key, tile);
          const StepScales<Fragments, kBlocks> of_values(params.decode.v_scale != nullptr,
                                                         ring.value_scales() + key);
          softmax.update(s, tile);
          // Without this: the scales of values are dropped.
          of_values.multiply(s);
          // Without this: a NaN among the scales reaches rows that do not see its key.
          if (hides) row_scores.hide(s, first_key, 0.0f);
          softmax.fit(s, tile);
        } else {
          row_scores.apply(s, first_key, tile);
          softmax.update(s, tile);
        }
      }
      if (step == 0 && !Config::kValuesInKeys) {
        // Without this: values are read before this thread's copies are there.
        ring.wait_for_values();
        // Without this: values are read before the other threads' copies are there.
        sync_key_group<Config>();
      }
      if (has_rows) tile.value_block(s, ring.values() + first_column * sizeof(Cached), key);
    }
    ring.pop();
    i += output.tile_step();
  }
}

// Stores the state of an output without keys: o = 0 and lse = -inf.
template <typename Config>
__device__ void store_empty(const OutputRows& rows, int head_dim_v, const OutputSink& sink) {
  constexpr int kColumns = Config::kValueColumns / 4;
  for (int i = threadIdx.x; i < rows.count * kColumns; i += Config::kThreads) {
    const int row = i / kColumns, column = i % kColumns * 4;
    if (column < head_dim_v) sink.store(row, column, Float4{});
    if (column == 0) sink.store_lse(row, -INFINITY);
  }
}

// Grid: plan.num_workers workers of the lean partition, each plan.cluster_size neighbouring blocks,
// one-dimensional: as many as are resident on the device, or fewer where the line is short
// (plan.cu).
// Block: Config::kThreads threads, whose warps are kKeyGroups x kColumnGroups x kRowGroups, the row
// groups side by side: a warp has the kWarpRows rows of its row group, the keys of its key group of
// every tile, and the columns of its column group of q, K, V and o.
//
// Latents, whose values are the first columns of their keys, have one key group and tiles of 32
// keys: 16 rows by four column groups, or 64 rows by two. Of V and o a warp has 128 or 256 columns
// side by side, of q and K every fourth or second 16.
// Dynamic shared memory, by the offsets of TileConfig:
//   kQueries     [kQuerySlots][kRows][kHeadDim]: of the current output, or of it and the next
//   kScratch     products [2][kWarps][kWarpRows][keys of a step] that column groups exchange, then
//   the
//                weights of a fix-up
//   kStatistics  [kWarps]: maximum and sum of each warp's rows
//   kSchedule    the block's range of the line
//   kRing        [num_stages]: [K, V][kTileKeys][kHeadDim], [of K, of V][kTileKeys] scales; of
//                latents [kTileKeys][kHeadDim], which are K, and V in the first kValueColumns
//
// Where to read on, in the order of execution:
//   cut_line       schedule.cuh       the worker's range of the line, from the key ranges
//   OutputCursor   output_cursor.cuh  the outputs of that range, and this block's tiles of each
//   attend         above              the loop over tiles; of its parts
//     Loader::fill       loader.cuh   requests tiles ahead (tile_copies.cuh: by which thread)
//     Ring               ring.cuh     stages, and the waits for what was requested
//     Tile::score_block  s = q k: tile_mma.cuh, tile_mma_8_bits.cuh, the same of 8 rows in
//                        tile_mma_swapped.cuh and tile_mma_swapped_8_bits.cuh, tile_fma.cuh
//     add_other_columns  column_groups.cuh  the sum of the column groups' products
//     StepScales         scales.cuh   the scales of keys and values of 8 bits
//     RowScores::apply   softmax.cuh  scale, softcap, ALiBi, mask
//     OnlineSoftmax      softmax.cuh  weights, running maximum and sum
//     Tile::value_block  the same  o += p v
//   combine_warps  combine_warps.cuh  the key groups' states become one (o, lse) in a sink:
//     OutputSink           output.cuh   the caller's tensors, for an output of this block alone
//     PartialStates::Sink  fixup.cuh    the workspace, for an output that blocks share
//     StateSink            fixup.cuh    one of the two
//     ClusterSink          cluster.cuh  the block's shared memory, for its cluster
//     BlockSink            cluster.cuh  one of these two
//   merge_cluster  cluster.cuh        the states of a worker's blocks become one
//   complete_output  fixup.cuh        the last worker to arrive merges the partial states
template <typename Element, typename Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    lean_decode_kernel(const __grid_constant__ LaunchParams params) {
  // Before anything of global memory, the workspace included, is touched. The next launch's blocks
  // come as these leave, and wait here for all of them.
  griddepcontrol_launch_dependents();
  griddepcontrol_wait();
  char* shared = dynamic_shared_memory();
  auto& schedule = *reinterpret_cast<ScheduleMemory<Config>*>(shared + Config::kSchedule);
  static_assert(sizeof(schedule) <= Config::kScheduleBytes);
  if (!cut_line(params, schedule)) return;
  const int head_dim_v = params.decode.head_dim_v;

  OutputCursor<Config> output(params, schedule.range);
  Loader<Element, Config> loader(params, output, shared);
  Ring<Config> ring(params, shared);
  TileOf<Element, Config> tile;
  OnlineSoftmax<Config> softmax;
  const int worker = worker_of_block<Config>(params);
  int number = 0;
  for (; !output.done(); output.next()) {
    const OutputRows rows = output.rows();
    const OutputSink sink(params, rows);
    if (output.num_tiles() == 0 && output.owns_first() && rank_in_cluster<Config>(params) == 0) {
      store_empty<Config>(rows, head_dim_v, sink);
    }
    if (!output.worker_has_tiles()) continue;
    // The divisions that this takes would hold up the end of the output.
    const auto find_contributors = [&] {
      if (threadIdx.x == 0 && !output.is_whole()) schedule.contributors = output.contributors();
    };
    const PartialStates states(params.workspace.partials, Config::kRows, head_dim_v);
    const int64_t slot = partial_slot(worker, output.owns_first_tile());
    const StateSink<OutputSink> of_worker{sink, states.sink(slot), output.is_whole()};
    if (output.has_tiles()) {
      attend(params, output, rows, number++, loader, ring, tile, softmax, find_contributors);
      store_state(params, tile, softmax, rows, shared, ring.free_stage(), of_worker);
    } else {
      find_contributors();
      store_no_state<Config>(shared);
    }
    if (merge_cluster<Config>(params, rows, shared, ring.free_stage(), of_worker)) continue;
    const Contributors workers = schedule.contributors;
    complete_output<Config::kThreads>(params.workspace.counters, states, workers,
                                      worker - workers.first, rows.count, shared + Config::kScratch,
                                      sink);
  }
}

template <typename Element, int kHeadDim, typename Cached>
cudaError_t launch_instance(const LaunchParams& params, const Plan& plan, cudaStream_t stream) {
  return with_row_tile<Element, kHeadDim, Cached>(plan.row_tile, [&]<typename Config>() {
    return launch_kernel(lean_decode_kernel<Element, Config>, plan.num_workers * plan.cluster_size,
                         Config::kThreads, plan.shared_bytes, stream, params, plan.launches_early,
                         plan.cluster_size);
  });
}

template <typename Element, int kHeadDim, typename Cached>
cudaError_t find_resident_blocks_of_instance(const Plan& plan, int* blocks) {
  return with_row_tile<Element, kHeadDim, Cached>(plan.row_tile, [&]<typename Config>() {
    return find_resident_blocks(lean_decode_kernel<Element, Config>, Config::kThreads,
                                plan.shared_bytes, blocks);
  });
}

}  // namespace tree_attention::cuda
