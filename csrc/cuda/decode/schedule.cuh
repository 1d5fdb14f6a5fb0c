// SPDX-License-Identifier: BSD-3-Clause
//
// The lean schedule on the device: every block finds its own range of the line from the key ranges,
// so that no host value is needed and ranges may change between replays of a CUDA graph.
#pragma once

#include "common/partition.h"
#include "common/rows.h"
#include "launch.h"
#include "tile_config.cuh"

namespace tree_attention::cuda {

// Rows and KeyRange of rows.h in 32 bits, which hold them: registers are scarce.
struct OutputRows {
  int batch, head_kv;
  int begin, count;
};

struct Keys {
  int begin, end;  // the hull of the rows' ranges
  bool has_gaps;   // some key inside may be no row's: it is not to be read
};

// Row `row` of an output.
__device__ __forceinline__ RowPlace<int> place_of_row(const LaunchParams& params,
                                                      const OutputRows& rows, int row) {
  return tree_attention::place_of_row(rows.head_kv, rows.begin + row, params.group_size);
}

// Tiles that an output costs beyond its keys: its queries, the merge of its warps, its store.
constexpr int kOverheadTiles = 1;

// Fewer tiles per block cost more in partial states than more blocks gain.
constexpr int kMinWorkerTiles = 2;

// The sum of `value` over the threads up to this one; `total` becomes the sum over all.
template <int kThreads>
__device__ int64_t inclusive_sum(int64_t value, int64_t* warp_sums, int64_t& total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int64_t lower = __shfl_up_sync(0xffffffff, value, distance);
    if (lane >= distance) value += lower;
  }
  if (lane == 31) warp_sums[warp] = value;
  __syncthreads();
  total = 0;
#pragma unroll
  for (int i = 0; i < kThreads / 32; ++i) {
    const int64_t sum = warp_sums[i];
    if (i < warp) value += sum;
    total += sum;
  }
  __syncthreads();  // before the next call's writes
  return value;
}

// A unit is a (sequence, block of rows): its kv heads are outputs of the same keys. The line has
// the outputs in the order (sequence, row block, kv head), each kOverheadTiles longer than its
// keys.
template <typename Config>
class Schedule {
 public:
  __device__ Schedule(const LaunchParams& params, char* shared)
      : params_(params), shared_(reinterpret_cast<Shared*>(shared)) {
    static_assert(sizeof(Shared) <= Config::kScheduleBytes);
  }

  // Gives the blocks equal ranges of the line; returns whether there is one for this block. To be
  // called by all threads.
  __device__ bool cut_line() {
    const DecodeParams& p = params_.decode;
    const int num_units = p.batch * static_cast<int>(params_.row_blocks.divisor);
    // With as many threads as units the first pass is enough.
    const bool one_pass = num_units <= Config::kThreads;
    int64_t sum, width, chunk_sum, total = 0;
    const auto add_chunk = [&](int first_unit) {
      const int unit = first_unit + threadIdx.x;
      width = unit < num_units
                  ? int64_t{p.num_heads_kv} * output_width(keys(params_, rows(unit, 0)))
                  : 0;
      sum = inclusive_sum<Config::kThreads>(width, shared_->warp_sums, chunk_sum);
    };
    for (int unit = 0; unit < num_units; unit += Config::kThreads) {
      add_chunk(unit);
      total += chunk_sum;
    }
    const int64_t most =
        p.num_workers > 0 ? total : (total + kMinWorkerTiles - 1) / kMinWorkerTiles;
    const Partition partition{total, most < gridDim.x ? most : int64_t{gridDim.x}};
    if (blockIdx.x >= partition.num_workers) return false;
    const int64_t begin = partition.begin(blockIdx.x);
    if (threadIdx.x == 0) {
      shared_->partition = partition;
      shared_->line_begin = begin;
      shared_->length = static_cast<int>(partition.begin(blockIdx.x + 1) - begin);
    }

    int64_t before = 0;
    for (int unit = 0; before <= begin; unit += Config::kThreads) {
      if (!one_pass) add_chunk(unit);
      if (before + sum - width <= begin && begin < before + sum) {
        shared_->first_unit = unit + threadIdx.x;
        shared_->first_line = before + sum - width;
      }
      before += chunk_sum;
    }
    __syncthreads();
    const int unit = first_unit() + threadIdx.x;
    if (threadIdx.x < kTableUnits && unit < num_units) {
      shared_->table[threadIdx.x] = keys(params_, rows(unit, 0));
    }
    __syncthreads();
    return true;
  }

  // FlashDecoding's schedule, for comparison only: gives each output blocks of its own, with equal
  // splits of its tiles. Returns how many, or 0 where none is left for this block.
  __device__ int take_split(int most_splits) {
    const int output = blockIdx.x / most_splits, split = blockIdx.x % most_splits;
    const int unit = output / params_.decode.num_heads_kv;
    const int64_t num_splits = splits_of_unit(unit, most_splits);
    if (split >= num_splits) return 0;
    if (threadIdx.x == 0) {
      const Keys unit_keys = keys(params_, rows(unit, 0));
      const int64_t tiles = num_tiles(unit_keys);
      const int64_t begin = split == 0 ? 0 : kOverheadTiles + split * tiles / num_splits;
      const int64_t end = kOverheadTiles + (split + 1) * tiles / num_splits;
      shared_->table[0] = unit_keys;
      shared_->first_unit = unit;
      shared_->first_line = 0;
      shared_->line_begin = output % params_.decode.num_heads_kv * output_width(unit_keys) + begin;
      shared_->length = static_cast<int>(end - begin);
    }
    __syncthreads();
    return static_cast<int>(num_splits);
  }

  __device__ int splits_of_unit(int unit, int most_splits) const {
    return max(1, min(num_tiles(keys(params_, rows(unit, 0))), most_splits));
  }

  __device__ const LaunchParams& params() const { return params_; }
  __device__ const Partition& partition() const { return shared_->partition; }
  __device__ int64_t line_begin() const { return shared_->line_begin; }
  __device__ int length() const { return shared_->length; }  // of the block's range
  __device__ int first_unit() const { return shared_->first_unit; }
  // Of the unit's first output.
  __device__ int64_t first_line() const { return shared_->first_line; }

  __device__ OutputRows rows(int unit, int head_kv) const {
    const int batch = params_.row_blocks.quotient(unit);
    const int begin = (unit - batch * params_.row_blocks.divisor) * Config::kRows;
    const int left = params_.group_size.divisor * params_.decode.seqlen_q - begin;
    return {batch, head_kv, begin, min(left, Config::kRows)};
  }

  // The keys that some row of the unit sees.
  __device__ Keys keys_of_unit(int unit) const {
    const int entry = unit - first_unit();
    return entry < kTableUnits ? shared_->table[entry] : keys(params_, rows(unit, 0));
  }

  // Whether some row sees the key, which is one of the hull.
  static __device__ bool is_seen(const LaunchParams& params, const OutputRows& rows, int key) {
    const int first_token = params.group_size.quotient(rows.begin);
    const int last_token = params.group_size.quotient(rows.begin + rows.count - 1);
    for (int token = first_token; token <= last_token; ++token) {
      const KeyRange keys = key_range(params.decode, rows.batch, token);
      if (keys.begin <= key && key < keys.end) return true;
    }
    return false;
  }

  static __device__ int num_tiles(const Keys& keys) {
    return (keys.end - keys.begin + Config::kTileKeys - 1) / Config::kTileKeys;
  }

  static __device__ int output_width(const Keys& keys) { return kOverheadTiles + num_tiles(keys); }

 private:
  static constexpr int kTableUnits = 32;
  struct Shared {
    Keys table[kTableUnits];
    int64_t warp_sums[Config::kWarps];
    // What a block knows of the line: in shared memory, since it is looked at once per output.
    Partition partition;
    int64_t line_begin, first_line;
    int32_t length, first_unit;
  };

  // Called from several places, and rarely: one copy of its loops is enough.
  static __device__ __noinline__ Keys keys(const LaunchParams& params, OutputRows rows) {
    const int first_token = params.group_size.quotient(rows.begin);
    const int last_token = params.group_size.quotient(rows.begin + rows.count - 1);
    KeyRange all{0, 0};
    bool has_gaps = false;
    for (int token = first_token; token <= last_token; ++token) {
      const KeyRange keys = key_range(params.decode, rows.batch, token);
      const bool apart = keys.end < all.begin || all.end < keys.begin;
      has_gaps = has_gaps || (apart && !keys.empty() && !all.empty());
      all = hull(all, keys);
    }
    return {static_cast<int>(all.begin), static_cast<int>(all.end), has_gaps};
  }

  const LaunchParams& params_;
  Shared* shared_;
};

// Walks the outputs of a block's range of the line.
template <typename Config>
class Cursor {
 public:
  __device__ explicit Cursor(const Schedule<Config>& schedule)
      : schedule_(schedule), unit_(schedule.first_unit()) {
    enter_unit();
    const int64_t offset = schedule.line_begin() - schedule.first_line();  // into the unit
    head_kv_ = static_cast<int>(offset / width());
    position_ = static_cast<int>(int64_t{head_kv_} * width() - offset);
  }

  __device__ bool done() const { return position_ >= schedule_.length(); }

  __device__ void next() {
    position_ += width();
    if (++head_kv_ == schedule_.params().decode.num_heads_kv) {
      head_kv_ = 0;
      ++unit_;
      if (!done()) enter_unit();
    }
  }

  __device__ OutputRows rows() const { return schedule_.rows(unit_, head_kv_); }
  __device__ const Keys& keys() const { return keys_; }  // of the whole output
  __device__ int num_tiles() const { return num_tiles_; }

  // The tiles of this output that the block computes: [tile_begin, tile_end).
  __device__ int tile_begin() const { return tile_at(0); }
  __device__ int tile_end() const { return tile_at(schedule_.length()); }

  // Whether the block owns the output's first place on the line: it writes an output without keys.
  __device__ bool owns_first() const { return position_ >= 0; }

  __device__ Contributors contributors() const {
    const int64_t begin = schedule_.line_begin() + position_ + kOverheadTiles;
    return tree_attention::contributors(schedule_.partition(), begin, begin + num_tiles_);
  }

 private:
  __device__ int width() const { return kOverheadTiles + num_tiles_; }

  __device__ void enter_unit() {
    keys_ = schedule_.keys_of_unit(unit_);
    num_tiles_ = schedule_.num_tiles(keys_);
  }

  __device__ int tile_at(int position) const {
    return tiles_below(position, position_, kOverheadTiles, num_tiles_);
  }

  const Schedule<Config>& schedule_;
  int position_;  // of the output on the line, from where the block's range begins
  int unit_, head_kv_;
  Keys keys_;
  int num_tiles_;
};

}  // namespace tree_attention::cuda
