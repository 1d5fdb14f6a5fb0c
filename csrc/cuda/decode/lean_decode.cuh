// SPDX-License-Identifier: BSD-3-Clause
//
// The decode kernel: one persistent launch. Each block takes an equal run of the line of tiles,
// wherever it begins and ends, streams its keys and values through a ring in shared memory, and
// leaves an output that it shares with other blocks to whichever of them arrives last.
#pragma once

#include "combine_warps.cuh"
#include "fixup.cuh"
#include "instances.cuh"
#include "load_ring.cuh"
#include "output.cuh"
#include "schedule.cuh"
#include "softmax.cuh"
#include "tile_fma.cuh"
#include "tile_mma.cuh"
#include "waiting_fixup.cuh"

namespace tree_attention::cuda {

template <typename Element, typename Config>
using TileOf = std::conditional_t<sizeof(Element) == 2, TileMma<Config, Element>, TileFma<Config>>;

// Attends the warp's rows to its keys of the block's tiles of an output, the `number`th of the
// block: `tile` and `softmax` become their unnormalised state.
template <typename Element, typename Config>
__device__ void attend(const LaunchParams& params, const Cursor<Config>& output,
                       const OutputRows& rows, int number, LoadRing<Element, Config>& ring,
                       TileOf<Element, Config>& tile, OnlineSoftmax& softmax) {
  using Tile = TileOf<Element, Config>;
  constexpr int kStepKeys =
      Config::kGroupKeys < Tile::kMaxStepKeys ? Config::kGroupKeys : Tile::kMaxStepKeys;
  static_assert(Config::kGroupKeys % kStepKeys == 0);
  const int warp = threadIdx.x / 32;
  const int row_group = warp % Config::kRowGroups, key_group = warp / Config::kRowGroups;
  const bool has_rows = 16 * row_group < rows.count;
  const RowScores row_scores(params, rows, output.keys(), 16 * row_group);

  tile.clear();
  softmax.clear();
  ring.fill(number);
  ring.wait_for_keys();
  __syncthreads();  // all threads fetched the queries
  tile.load_queries(ring.queries(number), row_group);
  if constexpr (Config::kQuerySlots == 1) __syncthreads();  // the ring may fetch the next ones

  for (int i = output.tile_begin(), end = output.tile_end(); i < end; ++i) {
    ring.wait_for_keys();
    ring.sync_key_group();
    ring.fill(number + 1);
    const int tile_key = output.keys().begin + i * Config::kTileKeys;
#pragma unroll
    for (int step = 0; step < Config::kGroupKeys / kStepKeys; ++step) {
      const int key = key_group * Config::kGroupKeys + step * kStepKeys;
      float s[kStepKeys / 8][4];
      if (has_rows) {
        tile.scores(s, ring.keys(), key);
        row_scores.apply(s, tile_key + key);
        softmax.update(s, tile);
      }
      if (step == 0) {
        ring.wait_for_values();
        ring.sync_key_group();
      }
      if (has_rows) tile.accumulate(s, ring.values(), key);
    }
    ring.pop();
  }
}

// An output without keys.
template <typename Config>
__device__ void store_empty(const OutputRows& rows, int head_dim_v, const OutputSink& sink) {
  constexpr int kColumns = Config::kHeadDim / 4;
  for (int i = threadIdx.x; i < rows.count * kColumns; i += Config::kThreads) {
    const int row = i / kColumns, column = i % kColumns * 4;
    if (column < head_dim_v) sink.store(row, column, Float4{});
    if (column == 0) sink.store_lse(row, -INFINITY);
  }
}

// The published alternatives, for comparison with the same inner loop: FlashDecoding's equal splits
// of each output, which a second kernel merges (num_workers is their number then), and
// LeanAttention's fix-up, whose first contributor waits for the others.
enum class Variant { kLean, kEqualSplits, kWaitingFixUp };

template <typename Element, typename Config, Variant kVariant>
__global__ void __launch_bounds__(Config::kThreads, 1)
    lean_decode_kernel(const __grid_constant__ LaunchParams params) {
  char* shared = dynamic_shared_memory();
  Schedule<Config> schedule(params, shared + Config::kSchedule);
  int num_splits = 0;
  if constexpr (kVariant == Variant::kEqualSplits) {
    num_splits = schedule.take_split(params.decode.num_workers);
    if (num_splits == 0) return;
  } else {
    if (!schedule.cut_line()) return;
  }
  const int head_dim_v = params.decode.head_dim_v;

  LoadRing<Element, Config> ring(schedule, shared);
  TileOf<Element, Config> tile;
  OnlineSoftmax softmax;
  int number = 0;
  for (Cursor<Config> output(schedule); !output.done(); output.next()) {
    const OutputRows rows = output.rows();
    const OutputSink sink(params, rows);
    if (output.num_tiles() == 0 && output.owns_first()) {
      store_empty<Config>(rows, head_dim_v, sink);
    }
    const int num_tiles = output.tile_end() - output.tile_begin();
    if (num_tiles == 0) continue;
    attend<Element>(params, output, rows, number++, ring, tile, softmax);
    if (num_tiles == output.num_tiles()) {
      combine_warps<Config>(tile, softmax, rows, head_dim_v, shared, sink);
    } else {
      const PartialStates states(params.workspace.partials, Config::kRows, head_dim_v);
      const Contributors contributors =
          kVariant == Variant::kEqualSplits
              ? Contributors{blockIdx.x - blockIdx.x % params.decode.num_workers, num_splits}
              : output.contributors();
      const int64_t part = blockIdx.x - contributors.first;
      const int64_t slot = partial_slot(contributors, part);
      combine_warps<Config>(tile, softmax, rows, head_dim_v, shared, states.sink(slot));
      char* scratch = shared + Config::kScratch;
      if constexpr (kVariant == Variant::kEqualSplits) {
        // The second kernel is left to merge.
      } else if constexpr (kVariant == Variant::kWaitingFixUp) {
        wait_and_complete_output<Config::kThreads>(params.workspace.counters, states, contributors,
                                                   rows.count, scratch, sink);
      } else {
        complete_output<Config::kThreads>(params.workspace.counters, states, contributors,
                                          rows.count, scratch, sink);
      }
    }
  }
}

template <typename Element, int kHeadDim>
cudaError_t launch_instance(const LaunchParams& params, const Plan& plan, cudaStream_t stream) {
  return with_row_tile<Element, kHeadDim>(plan.row_tile, [&]<typename Config>() {
    return launch_kernel(lean_decode_kernel<Element, Config, Variant::kLean>, plan.num_workers,
                         Config::kThreads, plan.shared_bytes, stream, params);
  });
}

}  // namespace tree_attention::cuda
