// SPDX-License-Identifier: BSD-3-Clause
//
// The check of page ids that a debug mode asks for. Without it, results are wrong or the device
// faults where a range needs a page that does not exist.
#pragma once

#include <cuda_runtime_api.h>

#include "common/decode_params.h"

namespace tree_attention::cuda {

// The first entry in a list of pages that some range needs although it is no page's id.
struct BadPage {
  int32_t page;  // -1: none
  int32_t id;
};

struct CheckPagesParams {
  DecodeParams decode;
  BadPage* found;  // [batch, lists]
};

// Number of page lists of a sequence: one for all kv heads, or one for each.
TREE_ATTENTION_HOST_DEVICE int32_t num_page_lists(const DecodeParams& params) {
  return params.page_table_stride[1] == 0 ? 1 : params.num_heads_kv;
}

cudaError_t launch_check_pages(const CheckPagesParams& params, cudaStream_t stream);

}  // namespace tree_attention::cuda
