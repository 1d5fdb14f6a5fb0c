// SPDX-License-Identifier: BSD-3-Clause
//
// What a backend gets of one call of index_topk or merge_topk.
#pragma once

#include <cstdint>

#include "common/dtype.h"

namespace tree_attention {

struct IndexParams {
  DataType dtype;  // of q and k
  int64_t batch, seqlen_q, seqlen_k;
  int32_t num_heads, head_dim;

  const void* q;        // [batch, num_heads, seqlen_q, head_dim]
  int64_t q_stride[3];  // in elements; the last axis is contiguous
  const void* k;        // [batch, seqlen_k, head_dim], or [num_pages, page_size, head_dim]
  int64_t k_stride[2];
  const float* weights;  // [batch, num_heads, seqlen_q]; null: a choice for each head
  int64_t weights_stride[3];
  const int32_t* key_ranges;  // [batch, seqlen_q, 2]; null: all keys
  int64_t key_ranges_stride[2];
  const int32_t* key_slots;  // [seqlen_k]; null: 0, 1, ...
  const int64_t* query_positions;
  int64_t query_positions_stride[2];
  const int32_t* page_table;  // [batch, pages]; null: no pages
  int64_t page_table_stride;
  int32_t num_pages, page_size;

  float scale;
  int32_t topk, block, local_blocks;
  int64_t num_workers;

  float* scores;   // [batch, num_choices(), seqlen_q, topk], contiguous
  int32_t* slots;  // likewise

  int32_t num_choices() const { return weights == nullptr ? num_heads : 1; }
};

struct MergeTopkParams {
  int64_t num_parts, num_rows, num_entries;
  int32_t topk;
  const float* scores_parts;  // [num_parts, num_rows, num_entries]
  const int32_t* slots_parts;
  int64_t scores_stride[3], slots_stride[3];
  float* scores;  // [num_rows, topk], contiguous
  int32_t* slots;
};

}  // namespace tree_attention
