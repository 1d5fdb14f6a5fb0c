// SPDX-License-Identifier: BSD-3-Clause
//
// The scales of keys and values of 8 bits.
#pragma once

#include "cuda/element.cuh"
#include "fragments.cuh"

namespace tree_attention::cuda {

constexpr float kLog2E = 1.44269504088896340736f;

// The scales of a step's keys, or of their values: of_key[n] are those of the thread's two keys of
// block n of the products.
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

// Weights are multiplied by the scales of values of 8 bits and then become float16, which has no
// number between 0 and 2^-24. So they are relative to the largest of these products, which is a
// maximum of sums: of a score and the logarithm of a scale's magnitude, to base 2 and divided by
// 208. Logarithms beyond -80 and 128 are taken for these, and that of NaN for -80.
class ScaledScore {
 public:
  __device__ explicit ScaledScore(float scale)
      : scale_(fma_sat(lg2(fabsf(scale)), 1.0f / kRange, -kLeast / kRange)) {}

  __device__ float of(float score) const { return fmaf(score, kLog2E / kRange, scale_); }

  // What the scores' exponents are to be relative to where `maximum` is the largest of the above:
  // the largest product is then 4, and its weight at least 2^-126, which ex2 does not flush.
  static __device__ float base(float maximum) { return fmaf(maximum, kRange, kLeast - 2.0f); }

 private:
  static constexpr float kLeast = -80.0f, kRange = 128.0f - kLeast;

  float scale_;
};

}  // namespace tree_attention::cuda
