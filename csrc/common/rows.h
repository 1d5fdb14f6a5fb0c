// SPDX-License-Identifier: BSD-3-Clause
//
// The rows of an output and the keys they see, as every decode kernel reads them from the params.
#pragma once

#include <cstdint>

#include "decode_params.h"
#include "host_device.h"

namespace tree_attention {

// Keys [begin, end); the CUDA kernels count them in 32 bits.
template <typename Index>
struct BasicKeyRange {
  Index begin, end;

  TREE_ATTENTION_HOST_DEVICE bool empty() const { return begin >= end; }
};
using KeyRange = BasicKeyRange<int64_t>;

// Packed row r of a kv head is query token r / group_size and head r % group_size of its group, so
// that the rows of a token are neighbours and share a key range. An output is a block of packed
// rows, which share one pass over K and V.
struct Rows {
  int64_t batch, head_kv;
  int64_t begin, count;  // packed rows
};

// The query token and the query head of a row.
template <typename Index>
struct RowPlace {
  Index token, head;
};

// `packed` is a packed row of kv head `head_kv`. GroupSize is a number as a divisor, with
// quotient(n) for n / divisor; the CUDA kernels have a faster one than the plain division below.
template <typename Index, typename GroupSize>
TREE_ATTENTION_HOST_DEVICE RowPlace<Index> place_of_row(Index head_kv, Index packed,
                                                        const GroupSize& group_size) {
  const Index token = group_size.quotient(packed), num_heads = group_size.divisor;
  return {token, head_kv * num_heads + packed - token * num_heads};
}

struct PlainDivisor {
  int64_t divisor;

  TREE_ATTENTION_HOST_DEVICE int64_t quotient(int64_t n) const { return n / divisor; }
};

// Row `row` of `rows`.
TREE_ATTENTION_HOST_DEVICE RowPlace<int64_t> place_of_row(const DecodeParams& p, const Rows& rows,
                                                          int64_t row) {
  return place_of_row(rows.head_kv, rows.begin + row, PlainDivisor{p.group_size()});
}

// The range that the two numbers at `range` mean, clamped to the cache.
template <typename Index>
TREE_ATTENTION_HOST_DEVICE BasicKeyRange<Index> clamped_range(const int32_t* range,
                                                              Index seqlen_k) {
  const Index begin = range[0] < 0 ? 0 : range[0];
  const Index end = range[1] > seqlen_k ? seqlen_k : range[1];
  return {begin, end < begin ? begin : end};
}

// Where the range of a query token lies, if ranges are given.
TREE_ATTENTION_HOST_DEVICE const int32_t* place_of_key_range(const DecodeParams& p, int64_t batch,
                                                             int64_t token) {
  return p.key_ranges + batch * p.key_ranges_stride[0] + token * p.key_ranges_stride[1];
}

// The keys that a query token sees, clamped to the cache.
template <typename Index = int64_t>
TREE_ATTENTION_HOST_DEVICE BasicKeyRange<Index> key_range(const DecodeParams& p, int64_t batch,
                                                          int64_t token) {
  const Index seqlen_k = static_cast<Index>(p.seqlen_k);
  if (p.key_ranges == nullptr) return {0, seqlen_k};
  return clamped_range(place_of_key_range(p, batch, token), seqlen_k);
}

// The smallest range that holds the keys of both ranges; an empty range adds nothing.
template <typename Index>
TREE_ATTENTION_HOST_DEVICE BasicKeyRange<Index> hull(BasicKeyRange<Index> a,
                                                     BasicKeyRange<Index> b) {
  if (a.empty()) return b;
  if (b.empty()) return a;
  return {a.begin < b.begin ? a.begin : b.begin, a.end > b.end ? a.end : b.end};
}

// The hull of the keys that tokens [begin, end) see.
TREE_ATTENTION_HOST_DEVICE KeyRange hull_of_tokens(const DecodeParams& p, int64_t batch,
                                                   int64_t begin, int64_t end) {
  KeyRange keys{0, 0};
  for (int64_t token = begin; token < end; ++token) keys = hull(keys, key_range(p, batch, token));
  return keys;
}

// The global position of a query token.
TREE_ATTENTION_HOST_DEVICE int64_t query_position(const DecodeParams& p, int64_t batch,
                                                  int64_t token) {
  const int64_t* stride = p.query_positions_stride;
  return p.query_positions[batch * stride[0] + token * stride[1]];
}

// The global position of a local key.
TREE_ATTENTION_HOST_DEVICE int64_t key_position(const KeyLayout& layout, int64_t key) {
  return layout.first + key / layout.block * layout.stride + key % layout.block;
}

}  // namespace tree_attention
