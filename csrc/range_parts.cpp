// SPDX-License-Identifier: BSD-3-Clause
#include "range_parts.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/stack.h>

#include "argument_checks.h"

namespace tree_attention {
namespace {

// Ranges with the same union, of which no two have a key in common: in the order of their begins,
// each from where those before it end.
at::Tensor disjoint(const at::Tensor& ranges) {
  const int64_t last = ranges.size(2) - 1;
  const auto [begins, order] = ranges.select(-1, 0).sort(/*dim=*/-1);
  const at::Tensor ends = ranges.select(-1, 1).gather(-1, order);
  const at::Tensor covered = std::get<0>(ends.cummax(-1)).narrow(-1, 0, last);
  at::Tensor later = begins.narrow(-1, 1, last);
  later.copy_(at::maximum(later, covered));
  return at::stack({begins, ends}, -1);
}

// `args` with other tensors in the place of some.
DecodeArgs with(const DecodeArgs& args, const at::Tensor& q,
                const std::optional<at::Tensor>& key_ranges,
                const std::optional<at::Tensor>& query_positions,
                const std::optional<at::Tensor>& page_table,
                std::optional<at::ScalarType> out_dtype, int64_t num_ranges) {
  return {q,
          args.k,
          args.v,
          key_ranges,
          args.softmax_scale,
          args.softcap,
          args.alibi_slopes,
          query_positions,
          args.key_layout,
          page_table,
          args.k_scale,
          args.v_scale,
          out_dtype,
          args.num_workers,
          num_ranges};
}

// What is wrong with an argument is wrong with it for the first range of each query too.
void check(const DecodeArgs& args) {
  constexpr ArgumentChecks kCheck{"lean_decode"};
  const at::Tensor& ranges = *args.key_ranges;
  TORCH_CHECK(ranges.size(2) >= 1, "lean_decode: key_ranges must have at least 1 range, got shape ",
              ranges.sizes());
  if (args.q.dim() == 4) {
    kCheck.shape("key_ranges", "[batch, seqlen_q, num_ranges, 2]", ranges,
                 {args.q.size(0), args.q.size(2), ranges.size(2), 2});
  }
  const std::optional<at::Tensor> first = ranges.select(2, 0);
  check_inputs(with(args, args.q, first, args.query_positions, args.page_table, args.out_dtype, 1));
}

}  // namespace

bool has_several_ranges(const DecodeArgs& args) {
  return args.key_ranges && args.key_ranges->dim() == 4;
}

RangeParts::RangeParts(const DecodeArgs& args) : args_(args) {
  check(args);
  // A page has at least one key. Without keys, one range says as much as all.
  const bool has_keys = args.page_table || args.k.size(2) > 0;
  const at::Tensor ranges = has_keys ? *args.key_ranges : args.key_ranges->narrow(2, 0, 1);
  num_ranges_ = ranges.size(2);
  q_ = repeated(args.q);
  key_ranges_ = disjoint(ranges).transpose(1, 2).flatten(0, 1);
  if (args.query_positions) query_positions_ = repeated(*args.query_positions);
  if (args.page_table) {
    page_table_ = repeated(*args.page_table);
  } else if (has_keys) {
    // The keys of a sequence are its only page.
    page_table_ = repeated(at::arange(args.k.size(0), ranges.options()).unsqueeze(1));
  }
}

DecodeArgs RangeParts::call() const {
  return with(args_, q_, key_ranges_, query_positions_, page_table_, at::kFloat, num_ranges_);
}

at::Tensor RangeParts::by_range(const at::Tensor& result) const {
  return result.unflatten(0, {args_.q.size(0), num_ranges_}).transpose(0, 1);
}

at::Tensor RangeParts::repeated(const at::Tensor& x) const {
  return x.repeat_interleave(num_ranges_, 0);
}

}  // namespace tree_attention
