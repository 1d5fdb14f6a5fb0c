// SPDX-License-Identifier: BSD-3-Clause
//
// What an instruction set provides: the work on one output of the lean schedule.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../common/decode_params.h"

namespace tree_attention::cpu {

// Keys per tile of the lean schedule.
constexpr int kTileKeys = 64;

// Rows of an output: what shares one pass over K and V.
constexpr int kMaxRows = 128;

// Rows of one output: packed row r is query token r / group_size, head r % group_size of its group,
// so that the rows of a token are neighbours and share a key range.
struct Rows {
  int64_t batch, head_kv;
  int64_t begin, count;  // packed rows
};

struct KeyRange {
  int64_t begin, end;
};

inline KeyRange key_range(const DecodeParams& p, int64_t batch, int64_t token) {
  if (p.key_ranges == nullptr) return {0, p.seqlen_k};
  const int32_t* range =
      p.key_ranges + batch * p.key_ranges_stride[0] + token * p.key_ranges_stride[1];
  const int64_t begin = range[0] < 0 ? 0 : range[0];
  const int64_t end = range[1] > p.seqlen_k ? p.seqlen_k : range[1];
  return {begin, end < begin ? begin : end};
}

inline int64_t query_position(const DecodeParams& p, int64_t batch, int64_t token) {
  const int64_t* stride = p.query_positions_stride;
  return p.query_positions[batch * stride[0] + token * stride[1]];
}

struct Kernels {
  const char* name;

  // Bytes of scratch memory that attend needs, aligned to 64.
  size_t (*workspace_bytes)(const DecodeParams& params, int64_t num_rows);

  // The state of `rows` over their keys in `keys`: o [rows.count, head_dim_v], lse [rows.count].
  void (*attend)(const DecodeParams& params, const Rows& rows, KeyRange keys, void* workspace,
                 float* o, float* lse);

  // Writes a complete state to params.o and params.lse.
  void (*store)(const DecodeParams& params, const Rows& rows, const float* o, const float* lse);
};

extern const Kernels portable_kernels;
#if defined(__x86_64__)
extern const Kernels avx2_kernels, avx512_kernels, amx_kernels;
#endif

// The kernels in use (decode_isa.cpp).
const Kernels& kernels();

}  // namespace tree_attention::cpu
