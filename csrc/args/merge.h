// SPDX-License-Identifier: BSD-3-Clause
//
// Tensors to MergeParams: the only validation of merge_states, shared by every backend.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "common/merge_params.h"

namespace tree_attention {

// A checked call. The params point into the tensors, which keep their memory alive.
struct MergeCall {
  MergeParams params;
  at::Tensor o_parts, lse_parts, o, lse;
};

// Checks the parts and allocates the outputs.
MergeCall prepare_merge(const at::Tensor& o_parts, const at::Tensor& lse_parts,
                        std::optional<at::ScalarType> out_dtype);

// Checks the parts and the outputs that the caller gives.
MergeCall prepare_merge(const at::Tensor& o_parts, const at::Tensor& lse_parts, const at::Tensor& o,
                        const at::Tensor& lse);

}  // namespace tree_attention
