// SPDX-License-Identifier: BSD-3-Clause
//
// Queries that see several ranges of keys. Every range becomes a sequence of its own, whose keys a
// page table finds where they lie, and the partial states of a query's ranges are merged. So all
// ranges share one schedule, and a range costs what its keys cost. A backend writes the tensors
// that the call of these sequences needs in addition to the caller's, on CUDA in one launch.
#pragma once

#include <ATen/core/Tensor.h>

#include "args/decode.h"
#include "common/range_params.h"

namespace tree_attention {

// Whether key_ranges are [batch, seqlen_q, num_ranges, 2].
bool has_several_ranges(const DecodeArgs& args);

// Checks the arguments, and calls `check_range` for each range as if it were the only one.
void check_each_range(const DecodeArgs& args, void (*check_range)(const DecodeParams&));

class RangeParts {
 public:
  // Checks the arguments. The states are merged to one in `out_dtype`.
  RangeParts(const DecodeArgs& args, at::ScalarType out_dtype);

  // Otherwise the call is the caller's, with the only range.
  bool are_several() const { return call_.num_ranges > 1; }

  // What a backend has to write before the call. The params point into tensors of the call and of
  // the caller.
  const RangeParams& params() const { return params_; }

  // The call in which every range is a sequence. Its states are float32.
  const DecodeArgs& call() const { return call_; }

  // A result of that call, [num_ranges * batch, ...], by range, [num_ranges, batch, ...], which is
  // a view for a merge.
  at::Tensor by_range(const at::Tensor& result) const;

 private:
  at::Tensor repeated(const at::Tensor& x);

  DecodeArgs call_;
  RangeParams params_{};
};

}  // namespace tree_attention
