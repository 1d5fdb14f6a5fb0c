// SPDX-License-Identifier: BSD-3-Clause
#include "experts.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <vector>

#include "args/checks.h"
#include "args/experts.h"
#include "cpu/experts.h"
#include "cpu/kernels.h"

namespace tree_attention {
namespace {

// From so many rows on, widening a quantised weight once is less work than widening it row by row.
constexpr int64_t kManyRows = 32;
// torch's product of int8 weights reads behind the rows of other numbers of bfloat16 columns.
constexpr int64_t kInt8Columns = 16;

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
      if (x.size(0) < kManyRows && x.size(1) % kInt8Columns == 0) {
        return at::_weight_int8pack_mm(x, own, its_scale);
      }
      at::Tensor wide = own.to(x.scalar_type());
      // float16 ends at 65,504, which a sum of integers may exceed.
      if (x.scalar_type() == at::kHalf) return at::matmul(x, wide.mul_(its_scale.unsqueeze(1)).t());
      return at::matmul(x, wide.t()).mul_(its_scale);
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

// True for what the kernels take: weights by rows, and few rows for each expert.
bool suits_few_rows(const Weights& weights, const Order& order) {
  const at::Tensor& weight = weights.weight;
  if (weight.scalar_type() == at::kByte || weights.is_transposed || !weight.is_contiguous()) {
    return false;
  }
  for (size_t e = 0; e + 1 < order.begin.size(); ++e) {
    if (order.begin[e + 1] - order.begin[e] > cpu::WeightRows::kMaxRows) return false;
  }
  return true;
}

void multiply_few_rows(const at::Tensor& x, const Order& order, int64_t choices,
                       const Weights& weights, at::Tensor& out) {
  const at::Tensor& weight = weights.weight;
  const at::Tensor rows = at::from_blob(const_cast<int64_t*>(order.rows.data()),
                                        {static_cast<int64_t>(order.rows.size())}, at::kLong);
  const at::Tensor own = x.index_select(0, choices == 1 ? rows : rows.div(choices, "floor"));
  const DataType dtype = data_type(x.scalar_type(), "linear_of_experts", "x");
  cpu::multiply_experts({dtype, kv_data_type(weight.scalar_type(), dtype), own.const_data_ptr(),
                         order.rows.data(), order.begin.data(), weight.size(0), out.size(1),
                         x.size(1), weight.const_data_ptr(),
                         weights.scale.has_value() ? weights.scale->const_data_ptr() : nullptr,
                         out.mutable_data_ptr()});
}

}  // namespace

at::Tensor linear_of_experts(const at::Tensor& x, const at::Tensor& experts,
                             const at::Tensor& weight, const std::optional<at::Tensor>& scale,
                             int64_t front, bool is_transposed) {
  check_experts({x, experts, weight, scale, front, is_transposed});
  const int64_t count = experts.numel(), rows = x.size(0);
  const int64_t outputs = weight.size(is_transposed ? 2 : 1);
  at::Tensor out = at::empty({count, outputs}, x.options());
  if (out.numel() == 0) return out;
  if (x.size(1) == 0) return out.zero_();
  const int64_t choices = count / rows;
  const at::Tensor chosen = experts.contiguous();
  const Order order(elements<int64_t>(chosen), count, weight.size(0));
  const at::Tensor contiguous = x.contiguous();
  const Weights weights{weight, scale, front, is_transposed};
  if (suits_few_rows(weights, order)) {
    multiply_few_rows(contiguous, order, choices, weights, out);
    return out;
  }
  // One expert has all rows in their order: none is gathered, and none put back.
  if (weight.size(0) == 1 && choices == 1) return weights.product(contiguous, 0);
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

}  // namespace tree_attention
