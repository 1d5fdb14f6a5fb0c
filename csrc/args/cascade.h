// SPDX-License-Identifier: BSD-3-Clause
//
// Sequences whose page tables begin with the same pages. The queries of all of them are, over these
// pages, queries of one sequence: a group of sequences is one call, what each sequence has for
// itself is another one for all, and a sequence's states are merged.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "args/decode.h"

namespace tree_attention {

// Sequences that have the pages [begin, end) of their tables in common.
struct PageGroup {
  std::vector<int64_t> rows;
  int64_t begin, end;
};

// The operator page_groups: the groups that save more than they cost with so many heads, or
// least_keys_saved reads of a key, each as the number of its rows, the rows, begin and end. The
// page table is of the host and has integers.
std::vector<int64_t> page_groups(const at::Tensor& page_table, at::IntArrayRef num_pages,
                                 int64_t page_size, int64_t num_heads_q, int64_t num_heads_kv,
                                 int64_t head_dim, bool has_8_bits,
                                 std::optional<int64_t> least_keys_saved);

// Refuses what lean_decode takes and cascade_decode does not.
void check_cascade(const DecodeArgs& args);

// The groups of checked arguments, each before those within it: the given ones, as page_groups
// returns them, or, where the host can read the page table, those that save more than they cost, or
// least_keys_saved reads of a key.
std::vector<PageGroup> groups_of(const DecodeArgs& args, at::OptionalIntArrayRef given,
                                 std::optional<int64_t> least_keys_saved);

// A call of lean_decode, and where its state goes.
struct CascadeCall {
  DecodeArgs args;
  at::Tensor o, lse;

  // Copies the state to where it belongs, if o and lse are no views of that.
  void keep() const;

  at::Tensor kept_o, kept_lse, kept_rows;  // undefined where there is nothing to copy
};

// The calls of some groups. A sequence has a state for each group that it is in, and one for what
// is its own.
class CascadeParts {
 public:
  CascadeParts(const DecodeArgs& args, const std::vector<PageGroup>& groups);

  CascadeCall of_group(size_t index) const;
  CascadeCall of_others() const;

  // [parts, batch, num_heads_q, seqlen_q, ...]
  const at::Tensor& o() const { return o_; }
  const at::Tensor& lse() const { return lse_; }
  at::ScalarType out_dtype() const { return out_dtype_; }

 private:
  DecodeArgs args_;  // with float32 states
  const std::vector<PageGroup>& groups_;
  at::ScalarType out_dtype_;
  std::vector<int64_t> places_;  // of each group: the part that its states are
  at::Tensor o_, lse_;
};

}  // namespace tree_attention
