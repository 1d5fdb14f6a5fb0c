// SPDX-License-Identifier: BSD-3-Clause
//
// The end of a block's work on an output: the unnormalised states of its key groups become one
// (o, lse).
#pragma once

#include "cuda/element.cuh"
#include "softmax.cuh"

namespace tree_attention::cuda {

// The online softmax of the 16 rows of a warp, in shared memory.
struct WarpStatistics {
  float maximum[16], sum[16];
};

// To be called by all threads of a warp.
__device__ __forceinline__ void store_statistics(const OnlineSoftmax& softmax,
                                                 WarpStatistics& statistics) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float sum = softmax.sum[i];
    sum += __shfl_xor_sync(0xffffffff, sum, 1);
    sum += __shfl_xor_sync(0xffffffff, sum, 2);
    if (lane % 4 != 0) continue;
    statistics.maximum[lane / 4 + 8 * i] = softmax.maximum[i];
    statistics.sum[lane / 4 + 8 * i] = sum;
  }
}

// How the key groups' states of one row are combined.
template <int kKeyGroups>
struct RowCombination {
  float factor[kKeyGroups];  // of each group's o
  float inverse_sum;
  float lse;

  // statistics[g * stride] is that of key group g's warp.
  __device__ RowCombination(const WarpStatistics* statistics, int stride, int row) {
    float maximum = -INFINITY;
#pragma unroll
    for (int group = 0; group < kKeyGroups; ++group) {
      maximum = fmaxf(maximum, statistics[group * stride].maximum[row]);
    }
    const float base = OnlineSoftmax::finite_base(maximum);
    float sum = 0.0f;
#pragma unroll
    for (int group = 0; group < kKeyGroups; ++group) {
      const WarpStatistics& part = statistics[group * stride];
      factor[group] = ex2(part.maximum[row] - base);
      sum = fmaf(factor[group], part.sum[row], sum);
    }
    inverse_sum = 1.0f / sum;
    // The largest weight is one, so that a sum of zero means no key.
    lse = sum == 0.0f ? -INFINITY : fmaf(maximum, kLn2, logf(sum));
  }
};

// The o [16, 32] that every warp holds of some columns, in shared memory.
template <typename Config>
class WarpOutputs {
 public:
  static constexpr int kColumns = Config::kScratchColumns;

  __device__ explicit WarpOutputs(char* memory) : o_(reinterpret_cast<float*>(memory)) {}

  __device__ float* at(int warp, int row, int column) const {
    // The exclusive or permutes a row's chunks of eight columns: the writes of a warp, two columns
    // of eight rows, fall into different banks.
    return o_ + (warp * 16 + row) * kColumns + (column ^ (row & 3) * 8);
  }

 private:
  float* o_;
};

// To be called by all threads; `tile` and `softmax` are the warp's. Every thread then owns four
// columns of some rows, so that stores are coalesced; o passes through shared memory 32 columns at
// a time.
template <typename Config, typename Tile, typename Sink>
__device__ void combine_warps(const Tile& tile, const OnlineSoftmax& softmax,
                              const OutputRows& rows, int head_dim_v, char* shared,
                              const Sink& sink) {
  constexpr int kColumns = Config::kScratchColumns;
  static_assert(Config::kWarps * sizeof(WarpStatistics) == Config::kStatisticsBytes);
  auto* statistics = reinterpret_cast<WarpStatistics*>(shared + Config::kStatistics);
  const WarpOutputs<Config> outputs(shared + Config::kScratch);
  const int warp = threadIdx.x / 32;

  store_statistics(softmax, statistics[warp]);
#pragma unroll
  for (int begin = 0; begin < Config::kHeadDim; begin += kColumns) {
    tile.for_each_value(begin,
                        [&](int row, int column, float o) { *outputs.at(warp, row, column) = o; });
    __syncthreads();
    for (int i = threadIdx.x; i < Config::kRows * kColumns / 4; i += Config::kThreads) {
      const int row = i / (kColumns / 4), column = i % (kColumns / 4) * 4;
      if (row >= rows.count) break;
      const int first_warp = row / 16;  // of the key groups' warps with this row
      const RowCombination<Config::kKeyGroups> combination(statistics + first_warp,
                                                           Config::kRowGroups, row % 16);
      Float4 o{};
#pragma unroll
      for (int group = 0; group < Config::kKeyGroups; ++group) {
        const Float4 part =
            load_float4(outputs.at(group * Config::kRowGroups + first_warp, row % 16, column));
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          o.value[c] = fmaf(combination.factor[group], part.value[c], o.value[c]);
        }
      }
      if (begin == 0 && column == 0) sink.store_lse(row, combination.lse);
      if (begin + column < head_dim_v) {
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          o.value[c] = combination.lse == -INFINITY ? 0.0f : o.value[c] * combination.inverse_sum;
        }
        sink.store(row, begin + column, o);
      }
    }
    __syncthreads();  // before the next columns
  }
}

}  // namespace tree_attention::cuda
