// SPDX-License-Identifier: BSD-3-Clause
//
// Queries that see several ranges of keys. Every range becomes a sequence of its own, whose keys a
// page table finds where they lie, and the partial states of a query's ranges are merged. So all
// ranges share one schedule, and a range costs what its keys cost.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "decode_args.h"

namespace tree_attention {

// Whether key_ranges are [batch, seqlen_q, num_ranges, 2].
bool has_several_ranges(const DecodeArgs& args);

class RangeParts {
 public:
  // Checks the arguments, which must outlive this.
  explicit RangeParts(const DecodeArgs& args);

  // The call of which the ranges are the sequences. Its states are float32.
  DecodeArgs call() const;

  // A result of that call, [batch * num_ranges, ...], by range: [num_ranges, batch, ...].
  at::Tensor by_range(const at::Tensor& result) const;

 private:
  at::Tensor repeated(const at::Tensor& x) const;

  const DecodeArgs& args_;
  int64_t num_ranges_ = 0;
  at::Tensor q_;
  std::optional<at::Tensor> key_ranges_, page_table_, query_positions_;
};

}  // namespace tree_attention
