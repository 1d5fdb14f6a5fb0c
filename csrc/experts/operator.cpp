// SPDX-License-Identifier: BSD-3-Clause
#include "experts/operator.h"

// What at::mm_out and at::constant_pad_nd call: see args/empty_tensor.h.
#include <ATen/ops/constant_pad_nd_ops.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/mm_ops.h>

#include <algorithm>
#include <vector>

#include "args/checks.h"
#include "args/empty_tensor.h"
#include "experts/multiply.h"
#include "experts/params.h"
#include "experts/rows.h"
#include "experts/unpack.h"

namespace tree_attention {
namespace {

constexpr const char* kOp = "linear_of_experts";
constexpr ArgumentChecks kCheck{kOp};

// Every argument of the schema.
struct ExpertArgs {
  const at::Tensor& x;
  const at::Tensor& experts;
  const at::Tensor& weight;
  const std::optional<at::Tensor>& scale;
  int64_t front;
  bool is_transposed;
};

void check_weight(const ExpertArgs& args) {
  const auto& [x, experts, weight, scale, front, is_transposed] = args;
  const auto dtype = weight.scalar_type();
  const bool is_packed = dtype == at::kByte, is_quantised = is_packed || dtype == at::kChar;
  data_type(x.scalar_type(), kOp, "x");
  CHECK_ARG(scale.has_value() == is_quantised, "scale must be ", is_quantised ? "given" : "None",
            " for a weight of ", dtype_name(dtype), ", got ", is_quantised ? "None" : "a tensor");
  if (!is_quantised) kCheck.dtype("weight", weight, x.scalar_type());
  CHECK_ARG(!is_quantised || (!is_transposed && weight.is_contiguous()), "a weight of ",
            dtype_name(dtype), " must be contiguous and not transposed, got ",
            is_transposed ? "is_transposed = True" : "a view");
  const int64_t inputs = is_packed ? 2 * weight.size(2) : weight.size(is_transposed ? 1 : 2);
  CHECK_ARG(
      is_packed ? front >= 0 && front <= inputs - x.size(1) : front == 0 && x.size(1) == inputs,
      "x must have the ", inputs, " columns that weight takes, got ", x.size(1),
      " after a front of ", front);
  if (!is_quantised) return;
  kCheck.dtype("scale", *scale, x.scalar_type());
  CHECK_ARG(scale->is_contiguous(), "scale must be contiguous, got strides ", scale->strides());
  if (!is_packed) {
    kCheck.shape("scale", "[experts, outputs]", *scale, weight.sizes().slice(0, 2));
    return;
  }
  const int64_t groups = scale->dim() == 3 ? scale->size(2) : 0;
  kCheck.shape("scale", "[experts, outputs, groups]", *scale,
               {weight.size(0), weight.size(1), groups});
  constexpr int64_t kPacked = ExpertParams::kPacked;
  CHECK_ARG(inputs == groups * kPacked || inputs == groups * 2 * kPacked,
            "scale must have groups of ", kPacked, " or ", 2 * kPacked, " of the ", inputs,
            " columns of weight, got ", groups, " groups");
}

void check_experts(const ExpertArgs& args) {
  const auto& [x, experts, weight, scale, front, is_transposed] = args;
  CHECK_ARG(x.dim() == 2 && weight.dim() == 3 && experts.dim() == 1,
            "x, experts and weight must have 2, 1 and 3 axes, got ", x.dim(), ", ", experts.dim(),
            " and ", weight.dim());
  kCheck.dtype("experts", experts, at::kLong);
  const int64_t count = experts.numel(), rows = x.size(0);
  CHECK_ARG(rows == 0 ? count == 0 : count % rows == 0,
            "experts must have as many choices for each of the ", rows, " rows of x, got ", count);
  check_weight(args);
}

// Outputs that are widened at a time. For larger buffers malloc asks the system for new pages each
// time, which takes longer than filling them (on two threads, int8 [8192, 2048]: 9.7 ms, and 2.1 ms
// in parts).
constexpr int64_t kWidened = 1024;

struct Weights {
  const at::Tensor& weight;
  const std::optional<at::Tensor>& scale;
  bool is_transposed;

  bool is_packed() const { return weight.scalar_type() == at::kByte; }

  // The most rows of an expert that the kernels take, which widen a weight for each few of them.
  int64_t few_rows() const {
    return is_transposed || !weight.is_contiguous() ? 0 : cpu::WeightRows::kMaxRows;
  }

  // [rows, outputs] of [rows, inputs] and one expert.
  at::Tensor product(const at::Tensor& x, int64_t expert) const {
    const at::Tensor own = weight.select(0, expert);
    at::Tensor out = empty_tensor({x.size(0), own.size(is_transposed ? 1 : 0)}, x.options());
    // mm_out keeps the dtype also under autocast, which at::matmul does not.
    if (!scale.has_value()) return at::_ops::mm_out::call(x, is_transposed ? own : own.t(), out);
    const at::Tensor its_scale = scale->select(0, expert);
    for (int64_t begin = 0; begin < own.size(0); begin += kWidened) {
      const int64_t count = std::min(kWidened, own.size(0) - begin);
      at::Tensor part = out.narrow(1, begin, count);
      at::_ops::mm_out::call(
          x, widened(own.narrow(0, begin, count), its_scale.narrow(0, begin, count)).t(), part);
    }
    return is_scaled_when_widened() ? out : out.mul_(its_scale);
  }

 private:
  // float16 ends at 65,504, which a sum of integers may exceed.
  bool is_scaled_when_widened() const { return is_packed() || scale->scalar_type() == at::kHalf; }

  at::Tensor widened(const at::Tensor& own, const at::Tensor& its_scale) const {
    if (!is_packed()) {
      at::Tensor wide = own.to(its_scale.scalar_type());
      return is_scaled_when_widened() ? wide.mul_(its_scale.unsqueeze(1)) : wide;
    }
    const int64_t rows = own.size(0), inputs = 2 * own.size(1);
    at::Tensor wide = empty_tensor({rows, inputs}, its_scale.options());
    cpu::unpack(elements<uint8_t>(own), its_scale.const_data_ptr(),
                data_type(its_scale.scalar_type(), kOp, "scale"), rows, inputs,
                inputs / its_scale.size(1), wide.mutable_data_ptr());
    return wide;
  }
};

// The numbers of rows in the order of their experts, and where each expert's begin.
struct Order {
  std::vector<int64_t> rows, begin;

  Order(const int64_t* experts, int64_t count, int64_t num_experts)
      : rows(count), begin(num_experts + 1, 0) {
    for (int64_t i = 0; i < count; ++i) {
      CHECK_ARG(experts[i] >= 0 && experts[i] < num_experts, "experts must be in [0, ", num_experts,
                "), got ", experts[i]);
      ++begin[experts[i] + 1];
    }
    for (int64_t e = 0; e < num_experts; ++e) begin[e + 1] += begin[e];
    std::vector<int64_t> next(begin.begin(), begin.end() - 1);
    for (int64_t i = 0; i < count; ++i) rows[next[experts[i]]++] = i;
  }

  int64_t count(int64_t expert) const { return begin[expert + 1] - begin[expert]; }
};

// The rows of all experts that are sent few.
void multiply_few_rows(const at::Tensor& x, const Order& order, int64_t choices,
                       const Weights& weights, at::Tensor& out) {
  const at::Tensor& weight = weights.weight;
  std::vector<int64_t> few, begin{0};
  for (int64_t e = 0; e < weight.size(0); ++e) {
    const auto first = order.rows.begin() + order.begin[e];
    if (order.count(e) <= weights.few_rows()) few.insert(few.end(), first, first + order.count(e));
    begin.push_back(static_cast<int64_t>(few.size()));
  }
  const at::Tensor rows = at::from_blob(few.data(), {static_cast<int64_t>(few.size())}, at::kLong);
  const at::Tensor own = x.index_select(0, choices == 1 ? rows : rows.div(choices, "floor"));
  const DataType dtype = data_type(x.scalar_type(), kOp, "x");
  const DataType of_weight =
      weights.is_packed() ? DataType::kInt8 : kv_data_type(weight.scalar_type(), dtype);
  cpu::multiply_experts({dtype, of_weight, own.const_data_ptr(), few.data(), begin.data(),
                         weight.size(0), out.size(1), x.size(1), weight.const_data_ptr(),
                         weights.scale.has_value() ? weights.scale->const_data_ptr() : nullptr,
                         weights.is_packed() ? x.size(1) / weights.scale->size(2) : 0,
                         out.mutable_data_ptr()});
}

}  // namespace

at::Tensor linear_of_experts(const at::Tensor& x, const at::Tensor& experts,
                             const at::Tensor& weight, const std::optional<at::Tensor>& scale,
                             int64_t front, bool is_transposed) {
  check_experts({x, experts, weight, scale, front, is_transposed});
  const int64_t count = experts.numel(), rows = x.size(0);
  const int64_t outputs = weight.size(is_transposed ? 2 : 1);
  at::Tensor out = empty_tensor({count, outputs}, x.options());
  if (out.numel() == 0) return out;
  if (x.size(1) == 0) return out.zero_();
  const int64_t choices = count / rows;
  const at::Tensor chosen = experts.contiguous();
  const Order order(elements<int64_t>(chosen), count, weight.size(0));
  const Weights weights{weight, scale, is_transposed};
  const int64_t behind = weights.is_packed() ? 2 * weight.size(2) - front - x.size(1) : 0;
  const c10::SymInt padding[] = {front, behind};
  const at::Tensor padded =
      front + behind == 0 ? x : at::_ops::constant_pad_nd::call(x, padding, 0);
  const at::Tensor contiguous = padded.contiguous();
  // One expert has all rows in their order: none is gathered, and none put back.
  if (weight.size(0) == 1 && choices == 1 && count > weights.few_rows()) {
    return weights.product(contiguous, 0);
  }
  bool some_are_few = false;
  for (int64_t e = 0; e < weight.size(0); ++e) {
    const int64_t first = order.begin[e], number = order.count(e);
    if (number == 0) continue;
    if (number <= weights.few_rows()) {
      some_are_few = true;
      continue;
    }
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
  if (some_are_few) {
    multiply_few_rows(contiguous, order, choices, weights, out);
  }
  return out;
}

}  // namespace tree_attention
