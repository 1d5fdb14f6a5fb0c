// SPDX-License-Identifier: BSD-3-Clause
//
// The scales of keys and values of 8 bits.
#pragma once

#include "cuda/element.cuh"
#include "fragments.cuh"

namespace tree_attention::cuda {

// The scales of a step's keys, or of their values. of_key[n] holds the scales of the thread's two
// keys in block n of the products.
template <typename Fragments, int kBlocks>
struct StepScales {
  float of_key[kBlocks][2];

  // `scales` are in shared memory. Where there are none, all are one.
  __device__ StepScales(bool exist, const float* scales) {
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
      Float2 pair = {1.0f, 1.0f};
      if (exist) pair = Fragments::load(scales + Fragments::kBlockKeys * n);
      for (int i = 0; i < 2; ++i) of_key[n][i] = pair.value[i];
    }
  }

  __device__ void multiply(float (&s)[kBlocks][4]) const {
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
      for (int c = 0; c < 4; ++c) s[n][c] *= of_key[n][Fragments::key_of(c)];
    }
  }
};

}  // namespace tree_attention::cuda
