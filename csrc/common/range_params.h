// SPDX-License-Identifier: BSD-3-Clause
//
// What a backend does before a decode in which every range of a query is a sequence
// (args/ranges.h).
#pragma once

#include <cstdint>

#include "host_device.h"

namespace tree_attention {

// A tensor [batch, rows, row], and its copies for the ranges: [num_ranges, batch, rows, row],
// contiguous. Rows are two axes with strides; these and a row are in elements of two
// bytes.
struct RepeatedTensor {
  const uint16_t* from;
  uint16_t* to;
  int64_t stride[3];  // {batch, first axis of rows, second axis of rows}
  int64_t num_rows[2];
  int64_t row_size;

  TREE_ATTENTION_HOST_DEVICE int64_t size_of_sequence() const {
    return num_rows[0] * num_rows[1] * row_size;
  }
};

struct RangeParams {
  const int32_t* ranges;     // [batch, seqlen_q, num_ranges, 2]
  int64_t ranges_stride[3];  // {batch, token, range}; the pair is contiguous

  // [num_ranges, batch, seqlen_q, 2], contiguous: ranges with the same union; no two ranges of
  // a query have a key in common. They are in the order of their begins, then of their ends, and
  // each begins no earlier than those before it end.
  int32_t* parts;
  int32_t* sequences;  // [num_ranges, batch]: the caller's sequence, or null

  RepeatedTensor repeated[3];
  int32_t num_repeated;
  int32_t num_ranges;
  int64_t batch, seqlen_q;
};

}  // namespace tree_attention
