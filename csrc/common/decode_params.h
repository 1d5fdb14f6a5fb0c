// SPDX-License-Identifier: BSD-3-Clause
//
// What a decode kernel is given: plain pointers and sizes, already validated (args/decode.cpp).
// Strides are in elements; the last axis of q, k, v and o is contiguous.
#pragma once

#include <cstdint>

#include "dtype.h"
#include "host_device.h"

namespace tree_attention {

// Global position of local key j: first + (j / block) * stride + j % block.
struct KeyLayout {
  int64_t first, block, stride;
};

struct DecodeParams {
  const void* q;  // [batch, num_heads_q, seqlen_q, head_dim]
  const void* k;  // [batch, num_heads_kv, seqlen_k, head_dim], or pages (see page_table)
  const void* v;  // like k, with head_dim_v
  void* o;        // [batch, num_heads_q, seqlen_q, head_dim_v]
  float* lse;     // [batch, num_heads_q, seqlen_q]

  // Axes of the strides: {batch, head, token}; of paged k and v: {page, head, slot}.
  int64_t q_stride[3], k_stride[3], v_stride[3], o_stride[3], lse_stride[3];

  // The only mask: half-open range of local keys per query; null means all keys. Kernels clamp it
  // to [0, seqlen_k]; an empty range gives o = 0, lse = -inf.
  const int32_t* key_ranges;     // [batch, seqlen_q, 2]
  int64_t key_ranges_stride[2];  // {batch, token}; the pair is contiguous

  // Factors of keys and values of 8 bits; null stands for 1. They have the first axes of k and v.
  const float *k_scale, *v_scale;
  int64_t k_scale_stride[3], v_scale_stride[3];

  // Score = alibi(softcap(softmax_scale * k_scale * q.k)).
  float softmax_scale;
  float softcap;                      // 0: off
  const float* alibi_slopes;          // [num_heads_q] or null: adds -slope * (query - key position)
  const int64_t* query_positions;     // [batch, seqlen_q], with alibi_slopes
  int64_t query_positions_stride[2];  // {batch, token}
  KeyLayout key_layout;

  // Key j of (batch, kv head) is slot j % page_size of page page_table[batch][head][j / page_size].
  const int32_t* page_table;     // [batch, num_heads_kv, pages_per_sequence] or null
  int64_t page_table_stride[2];  // {batch, head}; head stride 0 when the list is shared
  int32_t page_size;
  int32_t num_pages;

  int32_t batch, num_heads_q, num_heads_kv, seqlen_q;
  int64_t seqlen_k;  // with pages: pages_per_sequence * page_size
  int32_t head_dim, head_dim_v;
  int32_t num_workers;  // 0: the backend chooses; -1: it chooses, and cuts no output
  DataType dtype;       // of q
  DataType kv_dtype;    // of k and v: the dtype of q, or one of 8 bits
  DataType out_dtype;   // of o
  // The dtype of the result. It is out_dtype, unless o is a float32 state that is merged with
  // others and then rounded to this dtype: weights need no more digits than it has.
  DataType result_dtype;

  TREE_ATTENTION_HOST_DEVICE int32_t group_size() const { return num_heads_q / num_heads_kv; }
  // Ranges of a query: as many sequences here are one of the caller's, for messages.
  int32_t num_ranges = 1;
};

}  // namespace tree_attention
