// SPDX-License-Identifier: BSD-3-Clause
//
// merge_states: the only validation, shared by every backend, and the backends' entry points.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceGuard.h>

#include <optional>
#include <tuple>

#include "common/merge_params.h"

namespace tree_attention {

namespace cpu {
void merge_states(const MergeParams& params);
}
namespace cuda {
void merge_states(const MergeParams& params);  // on the current stream of the current device
}

// A checked call: the params point into the tensors, which keep their storage alive.
struct MergeCall {
  MergeParams params;
  at::Tensor o_parts, lse_parts, o, lse;
};

// With new outputs.
MergeCall prepare_merge(const at::Tensor& o_parts, const at::Tensor& lse_parts,
                        std::optional<at::ScalarType> out_dtype);
// With outputs of the caller's.
MergeCall prepare_merge(const at::Tensor& o_parts, const at::Tensor& lse_parts, const at::Tensor& o,
                        const at::Tensor& lse);

template <void (*launch)(const MergeParams&)>
std::tuple<at::Tensor, at::Tensor> merge_states(const at::Tensor& o_parts,
                                                const at::Tensor& lse_parts,
                                                std::optional<at::ScalarType> out_dtype) {
  const c10::DeviceGuard guard(o_parts.device());
  MergeCall call = prepare_merge(o_parts, lse_parts, out_dtype);
  launch(call.params);
  return {call.o, call.lse};
}

template <void (*launch)(const MergeParams&)>
void merge_states_out(const at::Tensor& o_parts, const at::Tensor& lse_parts, at::Tensor& o,
                      at::Tensor& lse) {
  const c10::DeviceGuard guard(o_parts.device());
  launch(prepare_merge(o_parts, lse_parts, o, lse).params);
}

}  // namespace tree_attention
