// SPDX-License-Identifier: BSD-3-Clause
//
// The way of a block through its range of the line: output by output, and tile by tile.
#pragma once

#include "schedule.cuh"

namespace tree_attention::cuda {

// Walks the outputs of a worker's range. Of each the blocks of the worker's cluster take the tiles
// in turn.
template <typename Config>
class OutputCursor {
 public:
  __device__ OutputCursor(const LaunchParams& params, const BlockRange& range)
      : params_(params),
        range_(range),
        position_(range.first_position),
        unit_(range.first_unit),
        head_kv_(range.first_head) {
    enter_unit();
  }

  __device__ bool done() const { return position_ >= range_.length; }

  __device__ void next() {
    position_ += length();
    if (++head_kv_ == params_.decode.num_heads_kv) {
      head_kv_ = 0;
      ++unit_;
      if (!done()) enter_unit();
    }
  }

  __device__ OutputRows rows() const { return Units<Config>(params_).rows(unit_, head_kv_); }

  // Keys and number of tiles of the whole output.
  __device__ const Keys& keys() const { return keys_; }
  __device__ int num_tiles() const { return Units<Config>(params_).num_tiles(keys_); }

  __device__ int first_key(int tile) const {
    return Units<Config>(params_).tiles_begin(keys_) + tile * Config::kTileKeys;
  }

  // The tiles of this output that the block computes: every tile_step() from tile_begin() on, below
  // tile_end().
  __device__ int tile_begin() const {
    const int begin = worker_tile_begin();
    return begin + (((rank_in_cluster<Config>(params_) - begin) & (tile_step() - 1)));
  }
  __device__ int tile_end() const { return tile_at(range_.length); }
  __device__ int tile_step() const { return cluster_size<Config>(params_); }
  __device__ bool has_tiles() const { return tile_begin() < tile_end(); }

  // Whether the worker computes tiles of this output, and whether all of them.
  __device__ bool worker_has_tiles() const { return worker_tile_begin() != tile_end(); }
  __device__ bool is_whole() const { return tile_end() - worker_tile_begin() == num_tiles(); }

  // Whether the worker owns the output's first position: it writes an output without keys.
  __device__ bool owns_first() const { return position_ >= 0; }
  // Whether it computes the output's first tile, if it computes any.
  __device__ bool owns_first_tile() const { return position_ >= -kOverheadTiles; }

  // The workers that compute tiles of this output, which has some.
  __device__ Contributors contributors() const {
    const int64_t begin = range_.begin + position_ + kOverheadTiles;
    const int64_t first = owner_of(range_.partition, begin);
    return {first, owner_of(range_.partition, begin + num_tiles() - 1) - first + 1};
  }

 private:
  __device__ int length() const { return kOverheadTiles + num_tiles(); }

  __device__ void enter_unit() {
    const int entry = unit_ - range_.keys_unit;
    keys_ =
        entry < range_.num_keys ? range_.keys[entry] : Units<Config>(params_).keys_by_call(unit_);
  }

  __device__ int worker_tile_begin() const { return tile_at(0); }

  __device__ int tile_at(int position) const {
    return tiles_below(position, position_, kOverheadTiles, num_tiles());
  }

  const LaunchParams& params_;
  const BlockRange& range_;
  int position_;  // of the output on the line, from where the worker's range begins
  int unit_, head_kv_;
  Keys keys_;
};

// Walks the tiles of a block's range. It begins before the first one.
template <typename Config>
class TileCursor {
 public:
  __device__ explicit TileCursor(const OutputCursor<Config>& first) : output_(first) {}

  __device__ bool done() const { return output_number_ == INT32_MAX; }
  __device__ bool has_begun() const { return output_number_ >= 0; }

  // Returns whether the next tile is of the same output.
  __device__ bool next() {
    tile_ += output_.tile_step();
    if (tile_ < tile_end_) return true;
    // The first output may be the one where the cursor begins.
    for (bool leaves = has_begun(); leaves || (!output_.done() && !output_.has_tiles());
         leaves = false) {
      output_.next();
    }
    output_number_ = output_.done() ? INT32_MAX : output_number_ + 1;
    tile_ = tile_begin_ = output_.tile_begin();
    tile_end_ = output_.tile_end();
    return false;
  }

  __device__ const OutputCursor<Config>& output() const { return output_; }
  __device__ int tile() const { return tile_; }
  __device__ int first_key() const { return output_.first_key(tile_); }

  // Whether the tile is the first of those that the block computes of its output, or the cursor
  // before all of them.
  __device__ bool begins_output() const { return tile_ == tile_begin_; }

  // The number of the tile's output among the outputs that the block has tiles of; beyond all
  // numbers when the tiles are done.
  __device__ int output_number() const { return output_number_; }

 private:
  OutputCursor<Config> output_;
  int tile_ = 0, tile_begin_ = 0, tile_end_ = 0;
  int output_number_ = -1;
};

}  // namespace tree_attention::cuda
