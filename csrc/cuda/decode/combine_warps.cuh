// SPDX-License-Identifier: BSD-3-Clause
//
// The end of a block's work on an output: the key groups' unnormalised states become one (o, lse).
#pragma once

#include "cuda/element.cuh"
#include "softmax.cuh"

namespace tree_attention::cuda {

// Called by all threads; `tile` and `softmax` are the warp's. Every thread then owns four columns
// of some rows, so that stores are coalesced; o passes through shared memory 32 columns at a time.
template <typename Config, typename Tile, typename Sink>
__device__ void combine_warps(const Tile& tile, OnlineSoftmax& softmax, const OutputRows& rows,
                              int head_dim_v, char* shared, const Sink& sink) {
  struct Statistics {
    float maximum[16], sum[16];  // of a warp's rows
  };
  static_assert(Config::kWarps * sizeof(Statistics) == Config::kStatisticsBytes);
  constexpr int kColumns = Config::kScratchColumns;
  auto* statistics = reinterpret_cast<Statistics*>(shared + Config::kStatistics);
  float* scratch = reinterpret_cast<float*>(shared + Config::kScratch);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  // Permutes a row's chunks of eight columns: writes of a warp, two columns of eight rows, fall
  // into different banks.
  const auto place = [](int any_warp, int row, int column) {
    return (any_warp * 16 + row) * kColumns + (column ^ (row & 3) * 8);
  };

#pragma unroll
  for (int i = 0; i < 2; ++i) {
    softmax.sum[i] += __shfl_xor_sync(0xffffffff, softmax.sum[i], 1);
    softmax.sum[i] += __shfl_xor_sync(0xffffffff, softmax.sum[i], 2);
    if (lane % 4 == 0) {
      statistics[warp].maximum[lane / 4 + 8 * i] = softmax.maximum[i];
      statistics[warp].sum[lane / 4 + 8 * i] = softmax.sum[i];
    }
  }
#pragma unroll
  for (int begin = 0; begin < Config::kHeadDim; begin += kColumns) {
    tile.for_each_value(
        begin, [&](int row, int column, float o) { scratch[place(warp, row, column)] = o; });
    __syncthreads();
    for (int i = threadIdx.x; i < Config::kRows * kColumns / 4; i += Config::kThreads) {
      const int row = i / (kColumns / 4), column = i % (kColumns / 4) * 4;
      if (row >= rows.count) break;
      const int first_warp = row / 16;  // of the key groups' warps with this row
      float maximum = -INFINITY;
#pragma unroll
      for (int group = 0; group < Config::kKeyGroups; ++group) {
        const Statistics& part = statistics[group * Config::kRowGroups + first_warp];
        maximum = fmaxf(maximum, part.maximum[row % 16]);
      }
      const float base = OnlineSoftmax::finite_base(maximum);
      float sum = 0.0f;
      Float4 o{};
#pragma unroll
      for (int group = 0; group < Config::kKeyGroups; ++group) {
        const int part_warp = group * Config::kRowGroups + first_warp;
        const Statistics& part = statistics[part_warp];
        const float factor = ex2(part.maximum[row % 16] - base);
        const Float4 part_o = load_float4(scratch + place(part_warp, row % 16, column));
        sum = fmaf(factor, part.sum[row % 16], sum);
#pragma unroll
        for (int c = 0; c < 4; ++c) o.value[c] = fmaf(factor, part_o.value[c], o.value[c]);
      }
      const bool empty = sum == 0.0f;  // the largest weight is one
      const float inverse = 1.0f / sum;
      if (begin == 0 && column == 0) {
        sink.store_lse(row, empty ? -INFINITY : fmaf(maximum, kLn2, logf(sum)));
      }
      if (begin + column < head_dim_v) {
#pragma unroll
        for (int c = 0; c < 4; ++c) o.value[c] = empty ? 0.0f : o.value[c] * inverse;
        sink.store(row, begin + column, o);
      }
    }
    __syncthreads();  // before the next columns
  }
}

}  // namespace tree_attention::cuda
