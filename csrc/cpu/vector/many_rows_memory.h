// SPDX-License-Identifier: BSD-3-Clause
//
// Which calls many_rows.h takes, and the memory of one.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/decode_params.h"
#include "common/rows.h"
#include "cpu/vector/arrays.h"
#include "cpu/vector/keys.h"
#include "cpu/vector/simd.h"

namespace tree_attention::cpu {
namespace {

// Memory of one call. The rows of a block are `width` lanes wide: kBlockRows, or less in the last;
// acc and total are [blocks, padded(head_dim_v), width].
struct LaneRowsMemory : RowArrays {
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
  size_t num_bytes;

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
    return LaneRowsMemory(p, num_rows, nullptr).num_bytes;
  }
  LaneRowsMemory(const DecodeParams& p, int64_t num_rows, void* memory) {
    num_rows = whole_vectors(num_rows);
    Arrays arrays(memory);
    arrays.take(q, num_rows * padded(p.head_dim));
    arrays.take(k, kBlockKeys * padded(p.head_dim));
    arrays.take(v, kBlockKeys * (padded(p.head_dim_v) + kPadding));
    arrays.take(k_scale, kBlockKeys);
    arrays.take(v_scale, kBlockKeys);
    arrays.take(scores, kBlockKeys * kBlockRows);
    take(arrays, num_rows, padded(p.head_dim_v));
    num_bytes = arrays.bytes();
  }
};

}  // namespace
}  // namespace tree_attention::cpu
