// SPDX-License-Identifier: BSD-3-Clause
//
// The end of a block's work on an output: the unnormalised states of its key groups become one
// (o, lse).
#pragma once

#include "cuda/element.cuh"
#include "softmax.cuh"
#include "tile_copies.cuh"

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

  // statistics[g * stride] is that of a warp of key group g.
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
    // The largest weight is one, or with values of 8 bits at least 2^-126, so that a sum of zero
    // means no key.
    lse = sum == 0.0f ? -INFINITY : fmaf(maximum, kLn2, logf(sum));
  }
};

// Keeps the o [kRows, kColumns] of every key group in a free stage of the ring: half of the rows
// where the group's keys were, half where its values were. So a group overwrites nothing that
// others read. Latents, whose keys no groups split, are halved.
template <typename Config>
class GroupOutputs {
 public:
  static constexpr int kHalfBytes = Config::kTileBytes / (Config::kValuesInKeys ? 2 : 1);
  static_assert(!Config::kValuesInKeys || Config::kKeyGroups == 1);
  // The columns of o that fit, in blocks of 32: all but with 128 rows, and with 64 of 256 or 512
  // columns.
  static constexpr int kFit = kHalfBytes / Config::kKeyGroups / (Config::kRows / 2 * 4);
  static constexpr int kColumns =
      Config::kValueColumns < kFit ? Config::kValueColumns : kFit / 32 * 32;
  static_assert(kColumns > 0);

  __device__ explicit GroupOutputs(char* stage) : stage_(stage) {}

  __device__ float* at(int group, int row, int column) const {
    constexpr int kHalf = Config::kRows / 2;
    char* half = stage_ + row / kHalf * kHalfBytes + group * (kHalfBytes / Config::kKeyGroups);
    // The exclusive or permutes a row's chunks of eight columns: the writes of a warp, two columns
    // of eight rows, fall into different banks.
    return reinterpret_cast<float*>(half) + row % kHalf * kColumns + (column ^ (row & 3) * 8);
  }

  // The place 8 rows below one of the first 8 of 16, and columns further, a multiple of 32.
  static __device__ float* moved(float* place, int rows, int columns) {
    constexpr int kRow = Config::kRows == 16 ? kHalfBytes / 32 : kColumns;
    return place + rows * kRow + columns;
  }

 private:
  char* stage_;
};

// To be called by all threads after the loop over tiles; `tile` and `softmax` are the warp's, and
// `stage` is one of the ring's that is free. Eight threads then own a row, each four neighbouring
// columns of every 32, so that stores are coalesced. The stage and the statistics may be written
// again after the caller's next barrier.
template <typename Config, typename Tile, typename Sink>
__device__ void combine_warps(const Tile& tile, const OnlineSoftmax& softmax,
                              const OutputRows& rows, int head_dim_v, char* shared, char* stage,
                              const Sink& sink) {
  constexpr int kColumns = GroupOutputs<Config>::kColumns;
  static_assert(Config::kWarps * sizeof(WarpStatistics) == Config::kStatisticsBytes);
  auto* statistics = reinterpret_cast<WarpStatistics*>(shared + Config::kStatistics);
  const GroupOutputs<Config> outputs(stage);
  const WarpGroups<Config> groups;

  float* pairs[Tile::kPairs];  // of the first columns
#pragma unroll
  for (int i = 0; i < Tile::kPairs; ++i) {
    const int row = 16 * groups.row + threadIdx.x % 32 / 4;
    pairs[i] = outputs.at(groups.key, row, Tile::column_of_pair(i));
  }

  store_statistics(softmax, statistics[threadIdx.x / 32]);
  sync_key_group<Config>();  // its keys and values in the stage have been read
#pragma unroll
  for (int begin = 0; begin < Config::kValueColumns; begin += kColumns) {
    const int num_columns = min(kColumns, Config::kValueColumns - begin);
    if (begin > 0) __syncthreads();  // before the next columns
#pragma unroll
    for (int own = 0; own < Config::kWarpColumns; own += 32) {
      const int block = groups.column * Config::kWarpColumns + own - begin;
      if (block < 0 || block >= num_columns) continue;
      tile.for_each_pair(own, [&](int i, int row, const Float2& o) {
        store_shared_float2(outputs.moved(pairs[i], 8 * row, block), o);
      });
    }
    __syncthreads();
    for (int row = threadIdx.x / 8; row < rows.count; row += Config::kThreads / 8) {
      const RowCombination<Config::kKeyGroups> combination(statistics + row / 16,
                                                           Config::kGroupWarps, row % 16);
      if (begin == 0 && threadIdx.x % 8 == 0) sink.store_lse(row, combination.lse);
#pragma unroll 1  // a store has a branch for each dtype: copies of it take longer to fetch
      for (int block = 0; block < num_columns; block += 32) {
        const int column = block + threadIdx.x % 8 * 4;
        if (begin + column >= head_dim_v) break;
        Float4 o{};
#pragma unroll
        for (int group = 0; group < Config::kKeyGroups; ++group) {
          const Float4 part = load_float4(outputs.at(group, row, column));
#pragma unroll
          for (int c = 0; c < 4; ++c) {
            o.value[c] = fmaf(combination.factor[group], part.value[c], o.value[c]);
          }
        }
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          o.value[c] = combination.lse == -INFINITY ? 0.0f : o.value[c] * combination.inverse_sum;
        }
        sink.store(row, begin + column, o);
      }
    }
  }
}

}  // namespace tree_attention::cuda
