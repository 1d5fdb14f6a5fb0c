// SPDX-License-Identifier: BSD-3-Clause
#include "experts/arguments.h"

#include "args/checks.h"
#include "experts/params.h"

namespace tree_attention {
namespace {

constexpr ArgumentChecks kCheck{"linear_of_experts"};

void check_weight(const ExpertArgs& args) {
  const auto& [x, experts, weight, scale, front, is_transposed] = args;
  const auto dtype = weight.scalar_type();
  const bool is_packed = dtype == at::kByte, is_quantised = is_packed || dtype == at::kChar;
  data_type(x.scalar_type(), kCheck.op, "x");
  TORCH_CHECK_VALUE(scale.has_value() == is_quantised, kCheck.op, ": scale must be ",
                    is_quantised ? "given" : "None", " for a weight of ", dtype_name(dtype),
                    ", got ", is_quantised ? "None" : "a tensor");
  if (!is_quantised) kCheck.dtype("weight", weight, x.scalar_type());
  TORCH_CHECK_VALUE(!is_quantised || (!is_transposed && weight.is_contiguous()), kCheck.op,
                    ": a weight of ", dtype_name(dtype),
                    " must be contiguous and not transposed, got ",
                    is_transposed ? "is_transposed = True" : "a view");
  const int64_t inputs = is_packed ? 2 * weight.size(2) : weight.size(is_transposed ? 1 : 2);
  TORCH_CHECK_VALUE(
      is_packed ? front >= 0 && front <= inputs - x.size(1) : front == 0 && x.size(1) == inputs,
      kCheck.op, ": x must have the ", inputs, " columns that weight takes, got ", x.size(1),
      " after a front of ", front);
  if (!is_quantised) return;
  kCheck.dtype("scale", *scale, x.scalar_type());
  TORCH_CHECK_VALUE(scale->is_contiguous(), kCheck.op, ": scale must be contiguous, got strides ",
                    scale->strides());
  if (!is_packed) {
    kCheck.shape("scale", "[experts, outputs]", *scale, weight.sizes().slice(0, 2));
    return;
  }
  const int64_t groups = scale->dim() == 3 ? scale->size(2) : 0;
  kCheck.shape("scale", "[experts, outputs, groups]", *scale,
               {weight.size(0), weight.size(1), groups});
  constexpr int64_t kPacked = ExpertParams::kPacked;
  TORCH_CHECK_VALUE(inputs == groups * kPacked || inputs == groups * 2 * kPacked, kCheck.op,
                    ": scale must have groups of ", kPacked, " or ", 2 * kPacked, " of the ",
                    inputs, " columns of weight, got ", groups, " groups");
}

}  // namespace

void check_experts(const ExpertArgs& args) {
  const auto& [x, experts, weight, scale, front, is_transposed] = args;
  TORCH_CHECK_VALUE(x.dim() == 2 && weight.dim() == 3 && experts.dim() == 1, kCheck.op,
                    ": x, experts and weight must have 2, 1 and 3 axes, got ", x.dim(), ", ",
                    experts.dim(), " and ", weight.dim());
  kCheck.dtype("experts", experts, at::kLong);
  const int64_t count = experts.numel(), rows = x.size(0);
  TORCH_CHECK_VALUE(rows == 0 ? count == 0 : count % rows == 0, kCheck.op,
                    ": experts must have as many choices for each of the ", rows,
                    " rows of x, got ", count);
  check_weight(args);
}

}  // namespace tree_attention
