// SPDX-License-Identifier: BSD-3-Clause
//
// Which calls many_rows.h takes, and the memory of one.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/decode_params.h"
#include "common/rows.h"
#include "cpu/vector/keys.h"
#include "cpu/vector/simd.h"

namespace tree_attention::cpu {
namespace {

// Memory of one call. The rows of a block are `width` lanes wide: kBlockRows, or less in the last.
struct LaneRowsMemory {
  static constexpr int kBlockVectors = kLanes == 8 ? 2 : 4;  // AVX2 has 16 registers, others 32
  static constexpr int kBlockRows = kBlockVectors * kLanes;
  static constexpr int kBlockSteps = 2, kBlockKeys = kBlockSteps * kStepKeys;
  static constexpr int kFewestRows = 24;  // with fewer, packing and empty lanes cost more
  // Floats between rows of values, whose lines would share a few sets of the cache.
  static constexpr int kPadding = 16;

  float* q;                  // [blocks, padded(head_dim), width], scaled by score_scale
  float* k;                  // [kBlockKeys, padded(head_dim)]
  float* v;                  // [kBlockKeys, padded(head_dim_v) + kPadding]
  float *k_scale, *v_scale;  // [kBlockKeys], of keys of 8 bits
  float* scores;             // [kBlockKeys, width], of one block
  float *acc, *total;        // [blocks, padded(head_dim_v), width]: since the last flush, before it
  double* sum;               // [rows], like the others: of all weights
  float *base, *total_base;  // weights are 2^(score - base); base at the last flush
  int32_t *begin, *end;      // see key_blocks.h

  // ALiBi's distances are of each row and key, and left to few rows at a time.
  static bool supports(const DecodeParams& p) {
    return p.alibi_slopes == nullptr && int64_t{p.group_size()} * p.seqlen_q >= kFewestRows;
  }
  static bool is_profitable(const DecodeParams& p, const Rows& rows) {
    return supports(p) && rows.count >= kFewestRows;
  }
  static int64_t whole_vectors(int64_t num_rows) {
    return (num_rows + kLanes - 1) / kLanes * kLanes;
  }
  static size_t bytes(const DecodeParams& p, int64_t num_rows) {
    const int64_t columns = padded(p.head_dim) + 2 * padded(p.head_dim_v) + 6;
    const int64_t of_key = padded(p.head_dim) + padded(p.head_dim_v) + kPadding + 2 + kBlockRows;
    return (whole_vectors(num_rows) * columns + kBlockKeys * of_key) * sizeof(float);
  }
  LaneRowsMemory(const DecodeParams& p, int64_t num_rows, void* memory) {
    num_rows = whole_vectors(num_rows);
    char* free = static_cast<char*>(memory);
    const auto take = [&]<typename T>(T*& array, int64_t size) {
      array = reinterpret_cast<T*>(free);
      free += size * sizeof(T);
    };
    take(q, num_rows * padded(p.head_dim));
    take(k, kBlockKeys * padded(p.head_dim));
    take(v, kBlockKeys * (padded(p.head_dim_v) + kPadding));
    take(k_scale, kBlockKeys);
    take(v_scale, kBlockKeys);
    take(scores, kBlockKeys * kBlockRows);
    take(acc, num_rows * padded(p.head_dim_v));
    take(total, num_rows * padded(p.head_dim_v));
    take(sum, num_rows);
    take(base, num_rows);
    take(total_base, num_rows);
    take(begin, num_rows);
    take(end, num_rows);
  }
};

}  // namespace
}  // namespace tree_attention::cpu
