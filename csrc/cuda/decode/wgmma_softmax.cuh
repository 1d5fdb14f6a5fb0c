// SPDX-License-Identifier: BSD-3-Clause
//
// The online softmax of four warps (the softmax of one warp is in softmax.cuh). They have different
// keys of the same rows, so that a maximum is known to all of them only after a barrier. Weights
// are therefore relative to a maximum that the scores of the row may exceed by a factor of
// 2^kHeadroom, which seldom happens twice: until then a tile takes one vote.
#pragma once

#include "softmax.cuh"
#include "tile_wgmma.cuh"

namespace tree_attention::cuda {

// The barrier of the threads that multiply. __syncthreads, for all threads, has number 0.
constexpr uint32_t kConsumerBarrier = 1;

template <typename Config>
struct SyncConsumers {
  static __device__ void sync() { bar_sync(kConsumerBarrier, Config::kConsumers); }
  // Whether `predicate` holds in any thread.
  static __device__ bool any(bool predicate) {
    return bar_red_or(kConsumerBarrier, Config::kConsumers, predicate);
  }
};

// Weights as operands. The largest weight is 2^kHeadroom. Times the scale of WeightsOf16Bits it
// would overflow float16.
template <typename Element>
struct LazyWeights {
  static constexpr bool kIsFloat16 = std::is_same_v<Element, Float16>;
  static constexpr float kHeadroom = kIsFloat16 ? 2.0f : 8.0f;
  static constexpr float kScale = kIsFloat16 ? 0x1p13f : 1.0f;
  static constexpr float kOutputScale = 1.0f / kScale;

  static __device__ uint32_t pack(float low, float high) {
    return cuda::pack<Element>(low * kScale, high * kScale);
  }
};

// The unnormalised states, without o, of the thread's rows, which are two in each block of eight.
template <typename Config, typename Element>
class LazySoftmax {
  using Fragments = KeysByRows;
  using Tile = TileWgmma<Config, Element>;
  using Scores = typename Tile::Scores;
  using Weights = LazyWeights<Element>;
  static constexpr int kRowBlocks = Tile::kRowBlocks;
  using OfRows = float[kRowBlocks][2];

 public:
  // `statistics` is shared memory, [warps][kRows].
  __device__ explicit LazySoftmax(float* statistics) : statistics_(statistics) {}

  __device__ void clear() {
#pragma unroll
    for (int i = 0; i < kRowBlocks; ++i) {
      for (int row = 0; row < 2; ++row) {
        maximum_[i][row] = kNoMaximum;
        sum_[i][row] = lost_[i][row] = 0.0f;
      }
    }
  }

  // Raises the maxima where scores are too far beyond them. To be called by all threads
  // that multiply, as everything below.
  __device__ void raise(const Scores& s, Tile& tile) {
    bool exceeds = false;
#pragma unroll
    for (int i = 0; i < 4 * kRowBlocks; ++i) {
      exceeds |= (s[i] - maximum_[i / 4][i % 2]) * kLog2E > Weights::kHeadroom;
    }
    // It is also the barrier after which the weights and statistics of the tile before may be
    // overwritten.
    if (!SyncConsumers<Config>::any(exceeds)) return;
    OfRows largest;
#pragma unroll
    for (int i = 0; i < kRowBlocks; ++i) {
      for (int row = 0; row < 2; ++row) {
        largest[i][row] = fmaxf(s[4 * i + row], s[4 * i + 2 + row]);
      }
    }
    OfRows factor;
    combine_warps(largest, [](float a, float b) { return fmaxf(a, b); });
#pragma unroll
    for (int i = 0; i < kRowBlocks; ++i) {
      for (int row = 0; row < 2; ++row) {
        const float larger = fmaxf(maximum_[i][row], largest[i][row]);
        factor[i][row] = ex2((maximum_[i][row] - larger) * kLog2E);
        maximum_[i][row] = larger;
        // Without this: the sums of rows stay relative to an older maximum.
        sum_[i][row] *= factor[i][row];
        lost_[i][row] *= factor[i][row];
      }
    }
    // Without this: the o of rows stays relative to an older maximum.
    tile.rescale(factor);
  }

  // Turns scores into weights, the operand of the next product at `weights`, [kRows] of 64
  // keys. A NaN score becomes a NaN weight: no maximum has it, but the sum.
  __device__ void weigh(const Scores& s, char* weights) {
    const int lane = threadIdx.x % 32;
    const int key = threadIdx.x / 32 * 16 + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < kRowBlocks; ++i) {
      float w[4];
#pragma unroll
      for (int c = 0; c < 4; ++c) w[c] = ex2((s[4 * i + c] - maximum_[i][c % 2]) * kLog2E);
      for (int row = 0; row < 2; ++row) {
        const float x = w[row] + w[2 + row] - lost_[i][row], larger = sum_[i][row] + x;
        lost_[i][row] = larger - sum_[i][row] - x;
        sum_[i][row] = larger;
      }
      // A thread has pairs of rows of a key, and an operand pairs of keys of a row.
      uint32_t pairs[2] = {Weights::pack(w[0], w[1]), Weights::pack(w[2], w[3])};
      transpose_weights(pairs);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int place = swizzled(8 * i + lane / 4, 2 * (key + 8 * half));
        *reinterpret_cast<uint32_t*>(weights + place) = pairs[half];
      }
    }
    // Without this: products read older weights.
    fence_proxy_async();
    // Without this: products read weights that other warps have not stored.
    SyncConsumers<Config>::sync();
  }

  // Adds the four warps' sums of each row, and all have the total. No key may follow.
  __device__ void finish() {
    combine_warps(sum_, [](float a, float b) { return a + b; });
  }

  // The factor by which o of the thread's row is multiplied at the end.
  __device__ float inverse_sum(int block, int row) const {
    const float sum = sum_[block][row];
    return sum == 0.0f ? 0.0f : Weights::kOutputScale / sum;
  }
  // The largest weight is one or more, so that a sum of zero means no key.
  __device__ float lse(int block, int row) const {
    const float sum = sum_[block][row];
    return sum == 0.0f ? -INFINITY : maximum_[block][row] + logf(sum);
  }

 private:
  // Combines x of all threads that have the same row, and each of them gets the result. Other
  // threads may still read the statistics of the call before.
  template <typename Function>
  __device__ void combine_warps(OfRows& x, Function function) const {
    float* const of_warp = statistics_ + threadIdx.x / 32 * kRows;
#pragma unroll
    for (int i = 0; i < kRowBlocks; ++i) {
      for (int row = 0; row < 2; ++row) {
        const float of_lanes = Fragments::combine_row(x[i][row], function);
        if (Fragments::is_first_of_row()) of_warp[place(i, row)] = of_lanes;
      }
    }
    // Without this: the four warps are combined before all have stored.
    SyncConsumers<Config>::sync();
#pragma unroll
    for (int i = 0; i < kRowBlocks; ++i) {
      for (int row = 0; row < 2; ++row) {
        x[i][row] = statistics_[place(i, row)];
#pragma unroll
        for (int warp = 1; warp < Config::kConsumerWarps; ++warp) {
          x[i][row] = function(x[i][row], statistics_[warp * kRows + place(i, row)]);
        }
      }
    }
  }

  static constexpr int kRows = Config::kRows;
  static __device__ int place(int block, int row) {
    return 8 * block + Fragments::first_row() + row;
  }

  float* statistics_;
  OfRows maximum_, sum_, lost_;
};

}  // namespace tree_attention::cuda
