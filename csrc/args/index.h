// SPDX-License-Identifier: BSD-3-Clause
//
// Tensors to IndexParams and MergeTopkParams: the only validation of index_topk and merge_topk,
// shared by every backend.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "common/index_params.h"

namespace tree_attention {

// Every argument of the schema of index_topk.
struct IndexArgs {
  const at::Tensor& q;
  const at::Tensor& k;
  const std::optional<at::Tensor>& weights;
  const std::optional<at::Tensor>& key_ranges;
  int64_t topk;
  double scale;
  int64_t block, local_blocks;
  const std::optional<at::Tensor>& key_slots;
  const std::optional<at::Tensor>& query_positions;
  const std::optional<at::Tensor>& page_table;
  int64_t num_workers;
};

// Checked calls. The params point into the tensors, which keep their memory alive.
struct IndexCall {
  IndexParams params;
  at::Tensor scores, slots;
};
struct MergeTopkCall {
  MergeTopkParams params;
  at::Tensor scores_parts, slots_parts, scores, slots;
};

IndexCall prepare_index(const IndexArgs& args);
MergeTopkCall prepare_merge_topk(const at::Tensor& scores, const at::Tensor& slots, int64_t topk);

}  // namespace tree_attention
