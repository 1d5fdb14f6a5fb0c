// SPDX-License-Identifier: BSD-3-Clause
#include "args/ranges.h"

#include <vector>

#include "args/checks.h"
#include "args/empty_tensor.h"

namespace tree_attention {
namespace {

// The arguments with one of the ranges of each query.
DecodeArgs with_range(const DecodeArgs& args, int64_t range) {
  DecodeArgs one = args;
  one.key_ranges = args.key_ranges->select(2, range);
  return one;
}

// Validating the first range of each query validates the other arguments.
DecodeParams check(const DecodeArgs& args) {
  constexpr ArgumentChecks kCheck{"lean_decode"};
  const at::Tensor& ranges = *args.key_ranges;
  TORCH_CHECK_VALUE(ranges.size(2) >= 1,
                    "lean_decode: key_ranges must have at least 1 range, got shape ",
                    ranges.sizes());
  if (args.q.dim() == 4) {
    kCheck.shape("key_ranges", "[batch, seqlen_q, num_ranges, 2]", ranges,
                 {args.q.size(0), args.q.size(2), ranges.size(2), 2});
  }
  const DecodeParams first = check_inputs(with_range(args, 0));
  kCheck.to_int32("num_ranges", ranges.size(2));
  return first;
}

}  // namespace

bool has_several_ranges(const DecodeArgs& args) {
  return args.key_ranges && args.key_ranges->dim() == 4;
}

void check_each_range(const DecodeArgs& args, void (*check_range)(const DecodeParams&)) {
  check_range(check(args));
  for (int64_t range = 1; range < args.key_ranges->size(2); ++range) {
    check_range(check_inputs(with_range(args, range)));
  }
}

RangeParts::RangeParts(const DecodeArgs& args, at::ScalarType out_dtype) : call_(args) {
  check(args);
  // A page has at least one key. Without keys, one range says as much as all.
  const bool has_keys = args.page_table || args.k.size(2) > 0;
  const at::Tensor& ranges = *args.key_ranges;
  call_.num_ranges = has_keys ? ranges.size(2) : 1;
  if (!are_several()) {
    call_.key_ranges = ranges.select(2, 0);
    return;
  }
  const int64_t batch = ranges.size(0), num_sequences = call_.num_ranges * batch;
  params_.num_ranges = static_cast<int32_t>(call_.num_ranges);
  params_.batch = batch;
  params_.seqlen_q = ranges.size(1);
  params_.ranges = elements<int32_t>(ranges);
  for (int axis = 0; axis < 3; ++axis) params_.ranges_stride[axis] = ranges.stride(axis);

  call_.key_ranges = empty_tensor({num_sequences, params_.seqlen_q, 2}, ranges.options());
  params_.parts = call_.key_ranges->data_ptr<int32_t>();
  call_.q = repeated(args.q);
  if (args.query_positions) call_.query_positions = repeated(*args.query_positions);
  if (args.page_table) {
    call_.page_table = repeated(*args.page_table);
  } else {
    // The keys of a sequence are its only page.
    call_.page_table = empty_tensor({num_sequences, 1}, ranges.options());
    params_.sequences = call_.page_table->data_ptr<int32_t>();
  }
  call_.out_dtype = at::kFloat;
  call_.result_dtype = args.result_dtype.value_or(out_dtype);
}

// [num_ranges * batch, ...]: a view of a single sequence, else memory that the backend fills.
at::Tensor RangeParts::repeated(const at::Tensor& x) {
  std::vector<int64_t> sizes = x.sizes().vec();
  sizes[0] *= call_.num_ranges;
  if (x.size(0) == 1) return x.expand(sizes);
  at::Tensor result = empty_tensor(sizes, x.options());
  const int64_t scale = static_cast<int64_t>(x.element_size()) / 2;
  RepeatedTensor& to_repeat = params_.repeated[params_.num_repeated++];
  to_repeat.from = static_cast<const uint16_t*>(x.const_data_ptr());
  to_repeat.to = static_cast<uint16_t*>(result.data_ptr());
  // The last axis is contiguous (check_inputs), except the last axis of query_positions.
  const bool has_rows = x.dim() > 2 || x.stride(-1) == 1;
  const int64_t last = has_rows ? x.dim() - 1 : x.dim();
  to_repeat.row_size = scale * (has_rows ? x.size(-1) : 1);
  to_repeat.stride[0] = scale * x.stride(0);
  for (int axis = 0; axis < 2; ++axis) {
    const bool exists = axis + 1 < last;
    to_repeat.num_rows[axis] = exists ? x.size(axis + 1) : 1;
    to_repeat.stride[axis + 1] = exists ? scale * x.stride(axis + 1) : 0;
  }
  return result;
}

at::Tensor RangeParts::by_range(const at::Tensor& result) const {
  return result.unflatten(0, {call_.num_ranges, result.size(0) / call_.num_ranges});
}

}  // namespace tree_attention
