// SPDX-License-Identifier: BSD-3-Clause
//
// The ring of tiles between the thread that requests them and the threads that multiply: a stage
// has a barrier in shared memory for each direction. A phase of `full` ends when a tile has
// arrived, one of `empty` when all warps are done with it. In each stage the first phase of both
// has parity 0. The producer finds every stage empty, so it begins with parity 1, as if a phase of
// `empty` had ended.
#pragma once

#include "launch.h"
#include "wgmma_config.cuh"

namespace tree_attention::cuda {

template <typename Config>
class WgmmaRing {
 public:
  __device__ WgmmaRing(const LaunchParams& params, char* shared, bool is_producer)
      : num_stages_(params.num_stages), shared_(shared_address(shared)), parity_(is_producer) {}

  // To be called by one thread, ahead of a barrier of the block.
  __device__ void begin() const {
    for (int stage = 0; stage < num_stages_; ++stage) {
      mbarrier_init(barrier(stage), 1);
      mbarrier_init(barrier(Config::kMaxStages + stage), Config::kConsumerWarps);
    }
    // Without this: copies arrive at barriers that they do not see.
    fence_mbarrier_init();
  }

  __device__ uint32_t full() const { return barrier(stage_); }
  // Where the stage begins, from the beginning of shared memory, and its address.
  __device__ int offset() const { return Config::kRing + stage_ * Config::kStageBytes; }
  __device__ uint32_t address() const { return shared_ + offset(); }

  __device__ void wait_until_full() const { wait(full()); }
  __device__ void wait_until_empty() const { wait(empty()); }

  // To be called by all threads of a warp that is done with the stage.
  __device__ void release() const {
    __syncwarp();  // another lane may read it
    if (threadIdx.x % 32 == 0) mbarrier_arrive(empty());
  }

  __device__ void advance() {
    if (++stage_ < num_stages_) return;
    stage_ = 0;
    parity_ ^= 1;
  }

 private:
  __device__ uint32_t barrier(int i) const { return shared_ + Config::kBarriers + 8 * i; }
  __device__ uint32_t empty() const { return barrier(Config::kMaxStages + stage_); }
  __device__ void wait(uint32_t barrier) const {
    while (!mbarrier_try_wait_parity(barrier, parity_)) {
    }
  }

  int num_stages_, stage_ = 0;
  uint32_t shared_, parity_;
};

}  // namespace tree_attention::cuda
