// SPDX-License-Identifier: BSD-3-Clause
//
// What append_kv is given, validated (args/append.cpp). Strides are in elements; the last axes of
// k, v and the caches are contiguous.
#pragma once

#include <cstdint>

#include "dtype.h"

namespace tree_attention {

// The keys, or the values, of the new tokens and where they go. Null, with head_dim 0, for values
// if the cache holds keys only.
struct AppendTensor {
  const void* rows;  // [batch, num_heads_kv, tokens, head_dim]
  void* cache;       // [batch, num_heads_kv, capacity, head_dim], or pages
  float* scale;      // the first three axes of the cache, or null
  int64_t stride[3], cache_stride[3], scale_stride[3];
  int64_t head_dim;
};

struct AppendParams {
  AppendTensor k, v;
  const int64_t* slots;  // [batch, tokens]: -1 is not kept
  int64_t slots_stride[2];
  int64_t batch, num_heads_kv, tokens;
  int64_t capacity;   // slots of a sequence, or of all pages
  int64_t page_size;  // 0 without pages
  DataType dtype;     // of the rows
  DataType cache_dtype;
};

}  // namespace tree_attention
