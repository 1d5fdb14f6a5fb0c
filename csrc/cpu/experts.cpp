// SPDX-License-Identifier: BSD-3-Clause
#include "experts.h"

#include <ATen/ATen.h>

#include <vector>

#include "args/checks.h"

namespace tree_attention::cpu {
namespace {

// From so many rows on, widening a quantised weight once is less work than widening it row by row.
constexpr int64_t kManyRows = 32;

struct Weights {
  const at::Tensor& weight;
  const std::optional<at::Tensor>& scale;
  int64_t front;
  bool is_transposed;

  // [rows, outputs] of [rows, inputs] and one expert.
  at::Tensor product(const at::Tensor& x, int64_t expert) const {
    const at::Tensor own = weight.select(0, expert);
    if (!scale.has_value()) return at::matmul(x, is_transposed ? own : own.t());
    const at::Tensor its_scale = scale->select(0, expert);
    if (own.scalar_type() == at::kChar) {
      if (x.size(0) < kManyRows) return at::_weight_int8pack_mm(x, own, its_scale);
      return at::matmul(x, own.to(x.scalar_type()).t()).mul_(its_scale);
    }
    const int64_t inputs = 2 * own.size(1);
    const at::Tensor padded = at::constant_pad_nd(x, {front, inputs - front - x.size(1)});
    return at::_weight_int4pack_mm_for_cpu(padded, own, inputs / its_scale.size(0), its_scale);
  }
};

// The numbers of rows in the order of their experts, and where each expert's begin.
struct Order {
  std::vector<int64_t> rows, begin;

  Order(const int64_t* experts, int64_t count, int64_t num_experts)
      : rows(count), begin(num_experts + 1, 0) {
    for (int64_t i = 0; i < count; ++i) {
      TORCH_CHECK(experts[i] >= 0 && experts[i] < num_experts,
                  "linear_of_experts: experts must be in [0, ", num_experts, "), got ", experts[i]);
      ++begin[experts[i] + 1];
    }
    for (int64_t e = 0; e < num_experts; ++e) begin[e + 1] += begin[e];
    std::vector<int64_t> next(begin.begin(), begin.end() - 1);
    for (int64_t i = 0; i < count; ++i) rows[next[experts[i]]++] = i;
  }
};

}  // namespace

at::Tensor linear_of_experts(const at::Tensor& x, const at::Tensor& experts,
                             const at::Tensor& weight, const std::optional<at::Tensor>& scale,
                             int64_t front, bool is_transposed) {
  TORCH_CHECK(x.dim() == 2 && weight.dim() == 3 && experts.dim() == 1,
              "linear_of_experts: x, experts and weight must have 2, 1 and 3 axes, got ", x.dim(),
              ", ", experts.dim(), " and ", weight.dim());
  TORCH_CHECK(experts.scalar_type() == at::kLong, "linear_of_experts: experts must be int64, got ",
              experts.scalar_type());
  const int64_t count = experts.numel(), rows = x.size(0);
  TORCH_CHECK(rows == 0 ? count == 0 : count % rows == 0,
              "linear_of_experts: experts must have as many choices for each of the ", rows,
              " rows of x, got ", count);
  const bool is_packed = scale.has_value() && weight.scalar_type() == at::kByte;
  const int64_t outputs = is_packed ? scale->size(2) : weight.size(is_transposed ? 2 : 1);
  at::Tensor out = at::empty({count, outputs}, x.options());
  if (out.numel() == 0) return out;
  if (x.size(1) == 0) return out.zero_();
  const int64_t choices = count / rows;
  const at::Tensor chosen = experts.contiguous();
  const Order order(elements<int64_t>(chosen), count, weight.size(0));
  const at::Tensor contiguous = x.contiguous();
  const Weights weights{weight, scale, front, is_transposed};
  for (int64_t e = 0; e < weight.size(0); ++e) {
    const int64_t first = order.begin[e], number = order.begin[e + 1] - first;
    if (number == 0) continue;
    if (number == 1) {
      const int64_t row = order.rows[first];
      out.narrow(0, row, 1).copy_(weights.product(contiguous.narrow(0, row / choices, 1), e));
      continue;
    }
    const at::Tensor own =
        at::from_blob(const_cast<int64_t*>(order.rows.data()) + first, {number}, at::kLong);
    const at::Tensor gathered =
        contiguous.index_select(0, choices == 1 ? own : own.div(choices, "floor"));
    out.index_copy_(0, own, weights.product(gathered, e));
  }
  return out;
}

}  // namespace tree_attention::cpu
