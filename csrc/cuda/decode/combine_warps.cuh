// SPDX-License-Identifier: BSD-3-Clause
//
// The end of a block's work on an output: the unnormalised states of its key groups become one
// (o, lse).
#pragma once

#include "cuda/element.cuh"
#include "softmax.cuh"
#include "tile_copies.cuh"

namespace tree_attention::cuda {

// The online softmax of the rows of a warp, in shared memory, without room for shifts that are
// zero.
template <int kRows, bool kHasScales>
struct WarpShifts {
  float shift[kRows];
};
template <int kRows>
struct WarpShifts<kRows, false> {};

template <typename Config>
struct WarpStatistics : WarpShifts<Config::kWarpRows, Config::kHasScales> {
  float maximum[Config::kWarpRows], sum[Config::kWarpRows];
};

// To be called by all threads of a warp.
template <typename Config>
__device__ __forceinline__ void store_statistics(const OnlineSoftmax<Config>& softmax,
                                                 WarpStatistics<Config>& statistics) {
  using Fragments = typename Config::Fragments;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const auto add = [](float a, float b) { return a + b; };
    const float sum = Fragments::combine_row(softmax.sum[i], add);
    if (!Fragments::is_first_of_row()) continue;
    const int row = Fragments::first_row() + Fragments::kRowStep * i;
    statistics.maximum[row] = softmax.maximum[i];
    statistics.sum[row] = sum;
    if constexpr (Config::kHasScales) statistics.shift[row] = softmax.shift[i];
  }
}

// How the key groups' states of one row are combined.
template <typename Config>
struct RowCombination {
  static constexpr int kKeyGroups = Config::kKeyGroups;

  float factor[kKeyGroups];  // of each group's o
  float inverse_sum;         // and of all of them
  float lse;

  // statistics[g * kGroupWarps] belongs to a warp of key group g.
  __device__ RowCombination(const WarpStatistics<Config>* statistics, int row) {
    const auto of_group = [&](int group) -> const WarpStatistics<Config>& {
      return statistics[group * Config::kGroupWarps];
    };
    float maximum = kNoMaximum;
#pragma unroll
    for (int group = 0; group < kKeyGroups; ++group) {
      maximum = fmaxf(maximum, of_group(group).maximum[row]);
    }
    float sum = 0.0f;
#pragma unroll
    for (int group = 0; group < kKeyGroups; ++group) {
      factor[group] = ex2((of_group(group).maximum[row] - maximum) * kLog2E);
      sum = fmaf(factor[group], of_group(group).sum[row], sum);
    }
    inverse_sum = 1.0f / sum;
    // The largest weight is one, so that a sum of zero means no key.
    lse = sum == 0.0f ? -INFINITY : maximum + logf(sum);
    if constexpr (Config::kHasScales) {
      // Each group's o is a multiple of 2^exponent. The largest is left to the end: these powers
      // have any size.
      float exponent[kKeyGroups], most = -INFINITY;
#pragma unroll
      for (int group = 0; group < kKeyGroups; ++group) {
        const WarpStatistics<Config>& part = of_group(group);
        exponent[group] = (part.maximum[row] - maximum) * kLog2E - part.shift[row];
        most = fmaxf(most, exponent[group]);
      }
#pragma unroll
      for (int group = 0; group < kKeyGroups; ++group) factor[group] = ex2(exponent[group] - most);
      inverse_sum *= ex2(most);
    }
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
    // of eight rows or eight of four, fall into different banks.
    const int permuted = column ^ Fragments::turn(row) * 8;
    return reinterpret_cast<float*>(half) + row % kHalf * kColumns + permuted;
  }

  // The place of a thread's row `i`, if `place` is the place of its row 0, and `columns` further, a
  // multiple of 32.
  static __device__ float* moved(float* place, int i, int columns) {
    constexpr int kStep = Fragments::kRowStep;
    constexpr int kFloats = kStep == Config::kRows / 2 ? kHalfBytes / 4 : kStep * kColumns;
    return place + i * kFloats + columns;
  }

 private:
  using Fragments = typename Config::Fragments;

  char* stage_;
};

// To be called by all threads after the loop over tiles; `tile` and `softmax` are the warp's, and
// `stage` is a free stage of the ring. Each row then gets eight or more threads, which have four
// neighbouring columns at a time, so that stores are coalesced. The stage and the statistics may be
// written again after the caller's next barrier.
template <typename Config, typename Tile, typename Sink>
__device__ void combine_warps(const Tile& tile, const OnlineSoftmax<Config>& softmax,
                              const OutputRows& rows, int head_dim_v, char* shared, char* stage,
                              const Sink& sink) {
  constexpr int kColumns = GroupOutputs<Config>::kColumns;
  constexpr int kWarpRows = Config::kWarpRows;
  using Statistics = WarpStatistics<Config>;
  static_assert(Config::kWarps * sizeof(Statistics) == Config::kStatisticsBytes);
  auto* statistics = reinterpret_cast<Statistics*>(shared + Config::kStatistics);
  const GroupOutputs<Config> outputs(stage);
  const WarpGroups<Config> groups;

  // The logarithm of the threads of a row: all take part where the rows are few.
  const int row_bits = max(3, __clz(rows.count - 1) - __clz(Config::kThreads) - 1);

  float* parts[Tile::kParts];  // of the first columns
#pragma unroll
  for (int i = 0; i < Tile::kParts; ++i) {
    const int row = kWarpRows * groups.row + Config::Fragments::first_row();
    parts[i] = outputs.at(groups.key, row, Tile::column_of_part(i));
  }

  store_statistics(softmax, statistics[threadIdx.x / 32]);
  // Without this: o overwrites keys that another thread still reads.
  sync_key_group<Config>();
#pragma unroll
  for (int begin = 0; begin < Config::kValueColumns; begin += kColumns) {
    const int num_columns = min(kColumns, Config::kValueColumns - begin);
    // Without this: the next columns overwrite those that are read.
    if (begin > 0) __syncthreads();
#pragma unroll
    for (int own = 0; own < Config::kWarpColumns; own += 32) {
      const int block = groups.column * Config::kWarpColumns + own - begin;
      if (block < 0 || block >= num_columns) continue;
      tile.for_each_part(own, [&](int i, int row, const auto& o) {
        store_shared(outputs.moved(parts[i], row, block), o);
      });
    }
    // Without this: warps are combined before all have stored.
    __syncthreads();
    for (int row = threadIdx.x >> row_bits; row < rows.count; row += Config::kThreads >> row_bits) {
      const RowCombination<Config> combination(statistics + row / kWarpRows, row % kWarpRows);
      const int thread = threadIdx.x & ((1 << row_bits) - 1);  // of the row's
      if (begin == 0 && thread == 0) sink.store_lse(row, combination.lse);
#pragma unroll 1  // a store has a branch for each dtype: copies of it take longer to fetch
      for (int column = 4 * thread; column < num_columns; column += 4 << row_bits) {
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
