// SPDX-License-Identifier: BSD-3-Clause
#include "args/ranges.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/stack.h>

#include <vector>

#include "args/checks.h"

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
  DecodeArgs first = args;
  first.key_ranges = ranges.select(2, 0);
  check_inputs(first);
}

}  // namespace

bool has_several_ranges(const DecodeArgs& args) {
  return args.key_ranges && args.key_ranges->dim() == 4;
}

RangeParts::RangeParts(const DecodeArgs& args) : call_(args) {
  check(args);
  // A page has at least one key. Without keys, one range says as much as all.
  const bool has_keys = args.page_table || args.k.size(2) > 0;
  const at::Tensor ranges = has_keys ? *args.key_ranges : args.key_ranges->narrow(2, 0, 1);
  const auto repeated = [&](const at::Tensor& x) {
    std::vector<int64_t> times(x.dim(), 1);
    times[0] = ranges.size(2);
    return x.repeat(times);
  };
  call_.q = repeated(args.q);
  call_.key_ranges = disjoint(ranges).permute({2, 0, 1, 3}).flatten(0, 1);
  if (args.query_positions) call_.query_positions = repeated(*args.query_positions);
  if (args.page_table) {
    call_.page_table = repeated(*args.page_table);
  } else if (has_keys) {
    // The keys of a sequence are its only page.
    call_.page_table = repeated(at::arange(args.k.size(0), ranges.options()).unsqueeze(1));
  }
  call_.out_dtype = at::kFloat;
  call_.num_ranges = ranges.size(2);
}

at::Tensor RangeParts::by_range(const at::Tensor& result) const {
  return result.unflatten(0, {call_.num_ranges, result.size(0) / call_.num_ranges});
}

}  // namespace tree_attention
