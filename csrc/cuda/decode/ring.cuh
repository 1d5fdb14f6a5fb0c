// SPDX-License-Identifier: BSD-3-Clause
//
// The ring of K and V tiles in shared memory: which stage holds which tile, and the waits for
// copies that are under way. A tile is two groups of copies (cp.async), its keys' with all scales
// and then its values', which is empty where the values are in the keys.
#pragma once

#include "launch.h"
#include "tile_config.cuh"

namespace tree_attention::cuda {

template <typename Config>
class Ring {
 public:
  __device__ Ring(const LaunchParams& params, char* shared)
      : params_(params), memory_(shared + Config::kRing) {}

  __device__ bool has_free_stage() const { return num_tiles_ < params_.num_stages; }

  // The stage of the next tile to be requested: its K, then its V.
  __device__ char* free_stage() const { return stage(after_oldest(num_tiles_)); }

  // To be called when both groups of copies into the free stage are under way.
  __device__ void push() { ++num_tiles_; }

  // K and V of the oldest tile.
  __device__ const char* keys() const { return stage(oldest_); }
  __device__ const char* values() const {
    return stage(oldest_) + (Config::kValuesInKeys ? 0 : Config::kTileBytes);
  }

  // The scales of its keys and of its values, if there are any.
  __device__ const float* key_scales() const { return scales(Config::kKeyScales); }
  __device__ const float* value_scales() const { return scales(Config::kValueScales); }

  // Wait until this thread's copies of the oldest tile's keys, or of its values, are complete.
  __device__ void wait_for_keys() const { wait<1>(); }
  __device__ void wait_for_values() const { wait<0>(); }

  // Gives up the oldest tile.
  __device__ void pop() {
    --num_tiles_;
    oldest_ = after_oldest(1);
  }

 private:
  // Waits until at most kPending of the oldest tile's two groups are incomplete. These are
  // comparisons in turn, because the compiler makes an indirect jump of a switch.
  template <int kPending>
  __device__ void wait() const {
    if (num_tiles_ > 3) return cp_async_wait_group<6 + kPending>();
    if (num_tiles_ > 2) return cp_async_wait_group<4 + kPending>();
    if (num_tiles_ > 1) return cp_async_wait_group<2 + kPending>();
    // Without this: a tile is read before its copies are there.
    cp_async_wait_group<kPending>();
  }

  __device__ const float* scales(int offset) const {
    return reinterpret_cast<const float*>(stage(oldest_) + offset);
  }
  __device__ char* stage(int index) const { return memory_ + index * Config::kStageBytes; }
  __device__ int after_oldest(int tiles) const {
    const int index = oldest_ + tiles;
    return index < params_.num_stages ? index : index - params_.num_stages;
  }

  const LaunchParams& params_;
  char* memory_;
  int oldest_ = 0;     // stage of the oldest tile
  int num_tiles_ = 0;  // requested and not given up
};

}  // namespace tree_attention::cuda
