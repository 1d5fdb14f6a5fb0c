// SPDX-License-Identifier: BSD-3-Clause
//
// The decode kernel for Hopper. The schedule, the masks and the fix-up are those of
// lean_decode.cuh; how tiles come to shared memory, the products and the softmax in the loop are
// its own: one thread asks for boxes of a tensor, four warps multiply what is in shared memory, and
// a row's maximum is raised only where scores are far beyond it.
#pragma once

#include "fixup.cuh"
#include "output.cuh"
#include "output_cursor.cuh"
#include "wgmma_launch.h"
#include "wgmma_ring.cuh"
#include "wgmma_softmax.cuh"

namespace tree_attention::cuda {

// The runs of a tile's keys that follow one another in a tensor of the maps: all of a tile, or
// those of some slots of a page each. Runs after the last key of the output are not copied. Runs in
// a gap between ranges are, and their keys hidden: a page outside of the map is read as zeros.
template <typename Config>
class TileRuns {
 public:
  // With pages, reads where the runs are.
  __device__ TileRuns(const LaunchParams& params, const OutputRows& rows, int first_key,
                      int end_key)
      : length_(Config::kTileKeys), count_(1) {
    const DecodeParams& p = params.decode;
    places_[0] = {first_key, rows.batch};
    if (p.page_table == nullptr) return;
    const int32_t* const pages =
        p.page_table + rows.batch * p.page_table_stride[0] + rows.head_kv * p.page_table_stride[1];
    length_ = Config::keys_of_run(params.page_size.divisor);
    count_ = (min(end_key - first_key, Config::kTileKeys) + length_ - 1) / length_;
#pragma unroll
    for (int run = 0; run < kMost; ++run) {
      if (run >= count_) break;
      const int key = first_key + run * length_, entry = params.page_size.quotient(key);
      places_[run] = {key - entry * static_cast<int>(params.page_size.divisor), pages[entry]};
    }
  }

  __device__ uint32_t num_bytes() const {
    return count_ * length_ * kBoxRowBytes * Config::kStageBoxes;
  }

  // Calls request(offset in a box, key or slot, batch or page) for each run.
  template <typename Request>
  __device__ __forceinline__ void for_each(Request request) const {
#pragma unroll
    for (int run = 0; run < kMost; ++run) {
      if (run >= count_) break;
      request(run * length_ * kBoxRowBytes, places_[run].key, places_[run].outer);
    }
  }

 private:
  static constexpr int kMost = Config::kTileKeys / Config::kMinRunKeys;

  int length_, count_;
  struct {
    int key, outer;
  } places_[kMost];
};

// Requests all tiles of the block, each when a stage is free, across outputs. To be called by one
// thread.
template <typename Config>
__device__ void request_tiles(const WgmmaParams& params, const OutputCursor<Config>& first,
                              WgmmaRing<Config> ring) {
  TileCursor<Config> next(first);
  for (next.next(); !next.done(); next.next()) {
    const OutputRows rows = next.output().rows();
    // Pages are read while the stage is not empty.
    const TileRuns<Config> runs(params.launch, rows, next.first_key(), next.output().keys().end);
    // Without this: a stage is filled that warps still read.
    ring.wait_until_empty();
    // Without this: the phase ends before the tile is there.
    mbarrier_arrive_expect_tx(ring.full(), runs.num_bytes());
    runs.for_each([&](int in_box, int key, int outer) {
      const auto request = [&](int offset, const CUtensorMap& map, int num_boxes) {
#pragma unroll 1
        for (int box = 0; box < num_boxes; ++box) {
          cp_async_bulk_tensor_4d(ring.address() + offset + box * Config::kBoxBytes + in_box, &map,
                                  box * Config::kBoxColumns, key, rows.head_kv, outer, ring.full());
        }
      };
      request(0, params.keys, Config::kKeyBoxes);
      if constexpr (!Config::kValuesInKeys) {
        request(Config::kValues, params.values, Config::kValueBoxes);
      }
    });
    ring.advance();
  }
}

// Copies the queries of an output to shared memory, and zeros where it has none. To be called by
// all threads that multiply, and it ends with a barrier of theirs.
template <typename Element, typename Config>
__device__ void load_queries(const LaunchParams& params, const OutputRows& rows, char* queries) {
  const DecodeParams& p = params.decode;
  constexpr int kChunks = Config::kHeadDim / 8, kBoxChunks = Config::kBoxColumns / 8;
#pragma unroll 1
  for (int i = threadIdx.x; i < Config::kRows * kChunks; i += Config::kConsumers) {
    const int row = i / kChunks, chunk = i % kChunks, column = 8 * chunk;
    const auto [token, head] = place_of_row(params, rows, min(row, rows.count - 1));
    const Element* source = static_cast<const Element*>(p.q) + rows.batch * p.q_stride[0] +
                            head * p.q_stride[1] + token * p.q_stride[2] +
                            (column < p.head_dim ? column : 0);
    char* const box = queries + chunk / kBoxChunks * Config::kQueryBoxBytes;
    cp_async_16(shared_address(box + swizzled(row, chunk % kBoxChunks * 16)), source,
                row < rows.count && column < p.head_dim ? 16 : 0);
  }
  cp_async_commit_group();
  // Without this: products read queries that are not there.
  cp_async_wait_group<0>();
  // Without this: products read older queries.
  fence_proxy_async();
  // Without this: products read queries that other threads have not fetched.
  SyncConsumers<Config>::sync();
}

// The keys that all rows of an output see, which has the keys `keys`. To be called by whole warps.
template <typename Config>
__device__ __forceinline__ BasicKeyRange<int> keys_of_all_rows(const LaunchParams& params,
                                                               const OutputRows& rows,
                                                               const Keys& keys) {
  BasicKeyRange<int> all{keys.begin, keys.end};
  if (params.decode.seqlen_q == 1) return all;
  const int token = params.group_size.quotient(rows.begin) + threadIdx.x % 32;
  const int last_token = params.group_size.quotient(rows.begin + rows.count - 1);
  const auto narrow = [&](int token) {
    // After the last token comes the last again, which changes nothing.
    const auto seen = key_range<int>(params.decode, rows.batch, min(token, last_token));
    all = {max(all.begin, seen.begin), min(all.end, seen.end)};
  };
  static_assert(Config::kRows <= 64);
  narrow(token);
  // Without this: tiles take no mask for tokens after the first 32.
  if constexpr (Config::kRows > 32) narrow(token + 32);
#pragma unroll
  for (int bit = 1; bit < 32; bit *= 2) {
    all = {max(all.begin, __shfl_xor_sync(0xffffffff, all.begin, bit)),
           min(all.end, __shfl_xor_sync(0xffffffff, all.end, bit))};
  }
  return all;
}

// Puts zeros in the place of values that no row sees, which may be NaN: a weight of zero would not
// hide them. To be called by all threads that multiply, after all have their scores, of which these
// values may be keys, and before `weigh`, whose fence and barrier come before products read zeros.
template <typename Config>
__device__ void hide_values(const LaunchParams& params, const OutputRows& rows, const Keys& keys,
                            int first_key, char* values) {
#pragma unroll 1
  for (int i = threadIdx.x; i < Config::kValueBoxes * Config::kBoxBytes / 16;
       i += Config::kConsumers) {
    const int key = first_key + i / (kBoxRowBytes / 16) % Config::kTileKeys;
    const bool is_seen = keys.begin <= key && key < keys.end &&
                         (!keys.has_gaps || Units<Config>::is_seen(params, rows, key));
    if (!is_seen) store_shared(reinterpret_cast<float*>(values + 16 * i), Float4{});
  }
}

// Attends the rows of an output to the block's tiles of it: `tile` and `softmax` become their
// unnormalised state. The last stage is not given up.
template <typename Element, typename Config>
__device__ void attend(const LaunchParams& params, const OutputCursor<Config>& output,
                       const OutputRows& rows, char* shared, WgmmaRing<Config>& ring,
                       TileWgmma<Config, Element>& tile, LazySoftmax<Config, Element>& softmax) {
  using Tile = TileWgmma<Config, Element>;
  const int first_key = threadIdx.x / 32 * 16;  // of the warp
  const uint32_t queries = shared_address(shared + Config::kQueries);
  char* const weights = shared + Config::kWeights;
  const Keys keys = output.keys();
  const BasicKeyRange<int> seen_by_all = keys_of_all_rows<Config>(params, rows, keys);

  tile.clear();
  softmax.clear();
  for (int i = output.tile_begin(), end = output.tile_end(); i < end; i += output.tile_step()) {
    // Without this: a tile is read before it is there.
    ring.wait_until_full();
    __syncwarp();  // for the product, after a loop that each thread leaves alone
    const int tile_key = output.first_key(i);
    const bool may_hide =
        tile_key < seen_by_all.begin || tile_key + Config::kTileKeys > seen_by_all.end;
    typename Tile::Scores s;
    tile.score_tile(s, ring.address(), queries);
    // What rows see is found again for each tile: o leaves no registers to keep it.
#pragma unroll
    for (int block = 0; block < Tile::kRowBlocks; ++block) {
      const RowScores<KeysByRows> row_scores(params, rows, keys, 8 * block, may_hide);
      float of_block[1][4];
      for (int c = 0; c < 4; ++c) of_block[0][c] = s[4 * block + c];
      row_scores.find_scores(of_block, tile_key + first_key, tile);
      if (may_hide) row_scores.hide(of_block, tile_key + first_key, -INFINITY);
      for (int c = 0; c < 4; ++c) s[4 * block + c] = of_block[0][c];
    }
    softmax.raise(s, tile);
    const bool has_all = keys.begin <= tile_key && tile_key + Config::kTileKeys <= keys.end;
    if (may_hide && (keys.has_gaps || !has_all)) {
      hide_values<Config>(params, rows, keys, tile_key, shared + ring.offset() + Config::kValues);
      __syncwarp();
    }
    softmax.weigh(s, weights);
    tile.value_tile(ring.address() + Config::kValues, shared_address(weights));
    if (i + output.tile_step() < end) {
      ring.release();
      ring.advance();
    }
  }
}

// Stores the state of an output. A warp has eight neighbouring columns in as many lanes, and
// stores four of a row: o passes through the last stage. To be called by all threads that multiply.
template <typename Element, typename Config, typename Sink>
__device__ void store_state(const LaunchParams& params, const OutputRows& rows,
                            const TileWgmma<Config, Element>& tile,
                            LazySoftmax<Config, Element>& softmax, char* stage, const Sink& sink) {
  constexpr int kColumns = Config::kValueColumns;
  static_assert(Config::kRows * kColumns * 4 <= Config::kStageBytes);
  const int columns = params.decode.head_dim_v / 4;
  float* const memory = reinterpret_cast<float*>(stage);
  const auto place = [&](int row, int column) {
    // The exclusive or lets the rows that a warp stores at a time use different banks.
    return memory + row * kColumns + (column ^ KeysByRows::turn(row) * 8);
  };
  // It has a barrier, after which nobody reads the tile.
  softmax.finish();
#pragma unroll
  for (int block = 0; block < TileWgmma<Config, Element>::kRowBlocks; ++block) {
    const int first = 8 * block + KeysByRows::first_row();
    const float factor[2] = {softmax.inverse_sum(block, 0), softmax.inverse_sum(block, 1)};
    tile.for_each_column(block, [&](int column, int i, float o) {
      // A sum of zero hides what o has of keys that no row of the block sees.
      *place(first + i, column) = factor[i] == 0.0f ? 0.0f : o * factor[i];
    });
    if (threadIdx.x < 4) {
      for (int i = 0; i < 2; ++i) {
        if (first + i < rows.count) sink.store_lse(first + i, softmax.lse(block, i));
      }
    }
  }
  // Without this: rows are read before all threads have stored them.
  SyncConsumers<Config>::sync();
#pragma unroll 1  // a store has a branch for each dtype
  for (int i = threadIdx.x; i < rows.count * columns; i += Config::kConsumers) {
    const int row = i / columns, column = i % columns * 4;
    sink.store(row, column, load_float4(place(row, column)));
  }
  // What was stored to the stage comes before the next copy to it.
  fence_proxy_async();
}

// Stores the state of an output without keys: o = 0 and lse = -inf.
template <typename Config, typename Sink>
__device__ void store_nothing(const OutputRows& rows, int head_dim_v, const Sink& sink) {
  const int columns = head_dim_v / 4;
  for (int i = threadIdx.x; i < rows.count * columns; i += Config::kConsumers) {
    const int row = i / columns, column = i % columns * 4;
    sink.store(row, column, Float4{});
    if (column == 0) sink.store_lse(row, -INFINITY);
  }
}

// Grid: plan.num_workers blocks, each a worker. Block: Config::kThreads threads, of which the first
// Config::kConsumers multiply and the next one requests tiles; the rest of its warp leaves.
// Dynamic shared memory: by the offsets of WgmmaConfig.
template <typename Element, typename Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kMaxBlocks)
    lean_decode_wgmma_kernel(const __grid_constant__ WgmmaParams all) {
  const LaunchParams& params = all.launch;
  // As in lean_decode_kernel.
  griddepcontrol_launch_dependents();
  griddepcontrol_wait();
  char* shared = dynamic_shared_memory();
  auto& schedule = *reinterpret_cast<ScheduleMemory<Config>*>(shared + Config::kSchedule);
  static_assert(sizeof(schedule) <= Config::kScheduleBytes);
  const bool multiplies = threadIdx.x < Config::kConsumers;
  WgmmaRing<Config> ring(params, shared, !multiplies);
  // The barrier at the end of cut_line comes before their first use.
  if (threadIdx.x == 0) ring.begin();
  if (!cut_line(params, schedule)) return;

  OutputCursor<Config> output(params, schedule.range);
  if (!multiplies) {
    if (threadIdx.x == Config::kConsumers) request_tiles(all, output, ring);
    return;
  }
  const int head_dim_v = params.decode.head_dim_v;
  const int worker = blockIdx.x;
  TileWgmma<Config, Element> tile;
  LazySoftmax<Config, Element> softmax(reinterpret_cast<float*>(shared + Config::kStatistics));
  for (; !output.done(); output.next()) {
    const OutputRows rows = output.rows();
    const OutputSink sink(params, rows);
    if (output.num_tiles() == 0 && output.owns_first()) {
      store_nothing<Config>(rows, head_dim_v, sink);
    }
    if (!output.has_tiles()) continue;
    load_queries<Element, Config>(params, rows, shared + Config::kQueries);
    // The divisions that this takes would hold up the end of the output.
    if (threadIdx.x == 0 && !output.is_whole()) schedule.contributors = output.contributors();
    attend(params, output, rows, shared, ring, tile, softmax);
    const PartialStates states(params.workspace.partials, Config::kRows, head_dim_v);
    const int64_t slot = partial_slot(worker, output.owns_first_tile());
    const StateSink<OutputSink> of_worker{sink, states.sink(slot), output.is_whole()};
    store_state(params, rows, tile, softmax, shared + ring.offset(), of_worker);
    ring.release();
    ring.advance();
    if (of_worker.is_output) continue;
    const Contributors workers = schedule.contributors;
    complete_output<Config::kConsumers, SyncConsumers<Config>>(
        params.workspace.counters, states, workers, worker - workers.first, rows.count,
        shared + Config::kScratch, sink);
  }
}

template <typename Element, int kHeadDim>
cudaError_t launch_wgmma_instance(const WgmmaParams& params, const Plan& plan,
                                  cudaStream_t stream) {
  return with_wgmma_rows<Element, kHeadDim>(plan.row_tile, [&]<typename Config>() {
    return launch_kernel(lean_decode_wgmma_kernel<Element, Config>, plan.num_workers,
                         Config::kThreads, plan.shared_bytes, stream, params, plan.launches_early);
  });
}

template <typename Element, int kHeadDim>
cudaError_t find_resident_blocks_of_wgmma_instance(const Plan& plan, int* blocks) {
  return with_wgmma_rows<Element, kHeadDim>(plan.row_tile, [&]<typename Config>() {
    return find_resident_blocks(lean_decode_wgmma_kernel<Element, Config>, Config::kThreads,
                                plan.shared_bytes, blocks);
  });
}

}  // namespace tree_attention::cuda
