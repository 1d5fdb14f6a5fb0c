// SPDX-License-Identifier: BSD-3-Clause
//
// Tensors to DecodeParams: the only validation of lean_decode, shared by every backend.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

#include "common/decode_params.h"

namespace tree_attention {

// Every argument of the schema except the outputs, as the dispatcher passes them, and the number of
// ranges that each are a sequence (ranges.h).
struct DecodeArgs {
  at::Tensor q, k, v;
  std::optional<at::Tensor> key_ranges;
  std::optional<double> softmax_scale;
  double softcap;
  std::optional<at::Tensor> alibi_slopes, query_positions;
  at::IntArrayRef key_layout;
  std::optional<at::Tensor> page_table, k_scale, v_scale;
  std::optional<at::ScalarType> out_dtype;
  int64_t num_workers;
  int64_t num_ranges = 1;
};

// Checks the inputs and returns params that lack only the outputs. An error names the argument,
// what is required of it, and the value that was given.
DecodeParams check_inputs(const DecodeArgs& args);

// Allocates o and lse for checked inputs.
std::tuple<at::Tensor, at::Tensor> allocate_outputs(const DecodeArgs& args);

// Checks o and lse against the inputs and completes the params.
void set_outputs(DecodeParams& params, const DecodeArgs& args, const at::Tensor& o,
                 const at::Tensor& lse);

}  // namespace tree_attention
