// SPDX-License-Identifier: BSD-3-Clause
#include "experts.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <vector>

#include "args/checks.h"
#include "cpu/converting.h"
#include "cpu/kernels.h"
#include "cpu/parallel.h"

namespace tree_attention::cpu {
namespace {

constexpr ArgumentChecks kCheck{"linear_of_experts"};

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

// Rows of weights of a task of one thread.
constexpr int64_t kBlock = 32;

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

// Of experts that few rows are sent to, all in one loop over the rows of their weights: a thread
// for each product would wait for the others after each of them.
bool few_rows_of_experts(const at::Tensor& x, const Order& order, int64_t choices,
                         const Weights& weights, at::Tensor& out) {
  const int64_t num_experts = weights.weight.size(0), outputs = out.size(1), inputs = x.size(1);
  std::vector<int64_t> hit;
  for (int64_t e = 0; e < num_experts; ++e) {
    const int64_t number = order.begin[e + 1] - order.begin[e];
    if (number > WeightRows::kMaxRows) return false;
    if (number > 0) hit.push_back(e);
  }
  const at::ScalarType dtype = weights.weight.scalar_type();
  const bool is_int8 = dtype == at::kChar;
  if (dtype == at::kByte || weights.is_transposed || !weights.weight.is_contiguous()) return false;
  // The activations of each expert one behind the other.
  const int64_t count = static_cast<int64_t>(order.rows.size());
  const at::Tensor rows =
      at::from_blob(const_cast<int64_t*>(order.rows.data()), {count}, at::kLong);
  const at::Tensor own = x.index_select(0, choices == 1 ? rows : rows.div(choices, "floor"));
  const DataType type = is_int8 ? DataType::kInt8 : data_type(dtype, "linear_of_experts", "weight");
  const int64_t blocks = (outputs + kBlock - 1) / kBlock;
  const DataType x_type = data_type(x.scalar_type(), "linear_of_experts", "x");
  with_dtype(x_type, [&]<typename T>() {
    using Value = typename Converting<T>::type;
    const auto* from = static_cast<const char*>(own.const_data_ptr());
    const auto* all = static_cast<const char*>(weights.weight.const_data_ptr());
    const Value* scales =
        is_int8 ? static_cast<const Value*>(weights.scale->const_data_ptr()) : nullptr;
    auto* to = static_cast<Value*>(out.mutable_data_ptr());
    const int64_t x_bytes = inputs * own.element_size();
    const int64_t row_bytes = inputs * weights.weight.element_size();
    const auto multiply = kernels().multiply_weight_rows;
    parallel_for(0, static_cast<int64_t>(hit.size()) * blocks, 1, [&](int64_t begin, int64_t end) {
      std::vector<float> workspace;
      float products[kBlock * WeightRows::kMaxRows];
      for (int64_t task = begin; task < end; ++task) {
        const int64_t expert = hit[task / blocks], first = order.begin[expert];
        const int64_t row = task % blocks * kBlock, from_row = expert * outputs + row;
        WeightRows w{x_type,
                     type,
                     from + first * x_bytes,
                     order.begin[expert + 1] - first,
                     all + from_row * row_bytes,
                     std::min(kBlock, outputs - row),
                     inputs,
                     nullptr,
                     products};
        workspace.resize(std::max<size_t>(workspace.size(), w.workspace_floats()));
        w.workspace = workspace.data();
        multiply(w);
        for (int64_t i = 0; i < w.count; ++i) {
          const float scale = scales == nullptr ? 1.0f : static_cast<float>(scales[from_row + i]);
          for (int64_t r = 0; r < w.rows; ++r) {
            to[order.rows[first + r] * outputs + row + i] =
                static_cast<Value>(scale * products[i * w.rows + r]);
          }
        }
      }
    });
  });
  return true;
}

void check_weight(const at::Tensor& x, const at::Tensor& weight,
                  const std::optional<at::Tensor>& scale, int64_t front, bool is_transposed) {
  const auto dtype = weight.scalar_type();
  const bool is_packed = dtype == at::kByte, is_quantised = is_packed || dtype == at::kChar;
  data_type(x.scalar_type(), kCheck.op, "x");
  TORCH_CHECK(scale.has_value() == is_quantised, kCheck.op, ": scale must be ",
              is_quantised ? "given" : "None", " for a weight of ", dtype_name(dtype), ", got ",
              is_quantised ? "None" : "a tensor");
  if (!is_quantised) kCheck.dtype("weight", weight, x.scalar_type());
  TORCH_CHECK(!is_quantised || (!is_transposed && weight.is_contiguous()), kCheck.op,
              ": a weight of ", dtype_name(dtype), " must be contiguous and not transposed, got ",
              is_transposed ? "is_transposed = True" : "a view");
  const int64_t inputs = is_packed ? 2 * weight.size(2) : weight.size(is_transposed ? 1 : 2);
  TORCH_CHECK(
      is_packed ? front >= 0 && front <= inputs - x.size(1) : front == 0 && x.size(1) == inputs,
      kCheck.op, ": x must have the ", inputs, " columns that weight takes, got ", x.size(1),
      " behind a front of ", front);
  if (!is_quantised) return;
  kCheck.dtype("scale", *scale, x.scalar_type());
  TORCH_CHECK(scale->is_contiguous(), kCheck.op, ": scale must be contiguous, got strides ",
              scale->strides());
  if (!is_packed) {
    kCheck.shape("scale", "[experts, outputs]", *scale, weight.sizes().slice(0, 2));
    return;
  }
  const int64_t groups = scale->dim() == 4 ? scale->size(1) : 0;
  kCheck.shape("scale", "[experts, groups, outputs, 2]", *scale,
               {weight.size(0), groups, weight.size(1), 2});
  TORCH_CHECK(inputs == 0 || (groups > 0 && inputs % groups == 0), kCheck.op,
              ": scale must have groups that divide the ", inputs, " columns of weight, got ",
              groups);
}

void check_arguments(const at::Tensor& x, const at::Tensor& experts, const at::Tensor& weight,
                     const std::optional<at::Tensor>& scale, int64_t front, bool is_transposed) {
  TORCH_CHECK(x.dim() == 2 && weight.dim() == 3 && experts.dim() == 1, kCheck.op,
              ": x, experts and weight must have 2, 1 and 3 axes, got ", x.dim(), ", ",
              experts.dim(), " and ", weight.dim());
  kCheck.dtype("experts", experts, at::kLong);
  const int64_t count = experts.numel(), rows = x.size(0);
  TORCH_CHECK(rows == 0 ? count == 0 : count % rows == 0, kCheck.op,
              ": experts must have as many choices for each of the ", rows, " rows of x, got ",
              count);
  check_weight(x, weight, scale, front, is_transposed);
}

}  // namespace

at::Tensor linear_of_experts(const at::Tensor& x, const at::Tensor& experts,
                             const at::Tensor& weight, const std::optional<at::Tensor>& scale,
                             int64_t front, bool is_transposed) {
  check_arguments(x, experts, weight, scale, front, is_transposed);
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
  if (few_rows_of_experts(contiguous, order, choices, weights, out)) return out;
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
