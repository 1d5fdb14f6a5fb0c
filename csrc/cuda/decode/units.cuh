// SPDX-License-Identifier: BSD-3-Clause
//
// The outputs of a launch, and the keys that each of them needs.
#pragma once

#include "common/rows.h"
#include "launch.h"
#include "tile_config.cuh"

namespace tree_attention::cuda {

// Rows and KeyRange of rows.h in 32 bits, which hold them: registers are scarce.
struct OutputRows {
  int batch, head_kv;
  int begin, count;
};

struct Keys {
  int begin, end;  // the hull of the rows' ranges
  bool has_gaps;   // some key of the hull may be in no row's range: it must not count
};

// Row `row` of an output.
__device__ __forceinline__ RowPlace<int> place_of_row(const LaunchParams& params,
                                                      const OutputRows& rows, int row) {
  return tree_attention::place_of_row(rows.head_kv, rows.begin + row, params.group_size);
}

// A unit is a block of packed rows of one sequence. Each of its kv heads is an output, and all of
// these outputs have the same keys.
template <typename Config>
class Units {
 public:
  __device__ explicit Units(const LaunchParams& params) : params_(params) {}

  __device__ int count() const { return params_.decode.batch * params_.row_blocks; }

  __device__ OutputRows rows(int unit, int head_kv) const {
    const int row_block = params_.batch.quotient(unit);
    const int batch = unit - row_block * params_.batch.divisor;
    const int begin = row_block * Config::kRows;
    const int left = params_.group_size.divisor * params_.decode.seqlen_q - begin;
    return {batch, head_kv, begin, min(left, Config::kRows)};
  }

  // The first requests of a block wait for this: a single query takes a few instructions in line.
  __device__ Keys keys(int unit) const {
    const DecodeParams& p = params_.decode;
    if (p.seqlen_q > 1) return keys_by_call(unit);
    const auto [begin, end] = key_range<int>(p, rows(unit, 0).batch, 0);
    return {begin, end, false};
  }

  // The same for where it is rare.
  __device__ Keys keys_by_call(int unit) const {
    const DecodeParams& p = params_.decode;
    if (p.key_ranges == nullptr) return {0, static_cast<int>(p.seqlen_k), false};
    const OutputRows rows = this->rows(unit, 0);
    const int first_token = params_.group_size.quotient(rows.begin);
    const int last_token = params_.group_size.quotient(rows.begin + rows.count - 1);
    return hull_of_ranges(place_of_key_range(p, rows.batch, first_token), p.key_ranges_stride[1],
                          last_token - first_token + 1, static_cast<int>(p.seqlen_k));
  }

  // Whether some of the rows sees the key, which is one of their hull.
  static __device__ bool is_seen(const LaunchParams& params, const OutputRows& rows, int key) {
    const int first_token = params.group_size.quotient(rows.begin);
    const int last_token = params.group_size.quotient(rows.begin + rows.count - 1);
#pragma unroll 1
    for (int token = first_token; token <= last_token; ++token) {
      const auto keys = key_range<int>(params.decode, rows.batch, token);
      if (keys.begin <= key && key < keys.end) return true;
    }
    return false;
  }

  // Where the first tile of keys begins.
  __device__ int tiles_begin(const Keys& keys) const {
    if constexpr (Config::kUsesWgmma) {
      // Copies take runs of a page's slots whole. Keys of an empty range make no tile.
      const int begin = keys.begin & -Config::keys_of_run(params_.page_size.divisor);
      return keys.begin < keys.end ? begin : keys.end;
    }
    return keys.begin;
  }

  __device__ int num_tiles(const Keys& keys) const {
    return (keys.end - tiles_begin(keys) + Config::kTileKeys - 1) / Config::kTileKeys;
  }

 private:
  static constexpr int kRangesInFlight = 4;  // loads of a thread

  // The keys of the tokens whose ranges are at `range`, `range + stride`, and so on. One copy is
  // enough for all callers; it takes values, because a function that is not inlined would read the
  // kernel's parameters as it reads global memory.
  static __device__ __noinline__ Keys hull_of_ranges(const int32_t* range, int64_t stride,
                                                     int num_tokens, int seqlen_k) {
    BasicKeyRange<int> all{0, 0};
    bool has_gaps = false;
    const auto length = [](const auto& keys) {
      return static_cast<uint32_t>(keys.end - keys.begin);
    };
#pragma unroll 1
    for (int token = 0; token < num_tokens; token += kRangesInFlight) {
      BasicKeyRange<int> keys[kRangesInFlight];
#pragma unroll
      for (int i = 0; i < kRangesInFlight; ++i) {
        keys[i] = clamped_range(range, seqlen_k);
        // After the last range comes the last again, which adds nothing.
        if (token + i + 1 < num_tokens) range += stride;
      }
#pragma unroll
      for (int i = 0; i < kRangesInFlight; ++i) {
        const BasicKeyRange<int> both = hull(all, keys[i]);
        has_gaps = has_gaps || length(both) > length(all) + length(keys[i]);
        all = both;
      }
    }
    return {all.begin, all.end, has_gaps};
  }

  const LaunchParams& params_;
};

}  // namespace tree_attention::cuda
