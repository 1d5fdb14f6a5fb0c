// SPDX-License-Identifier: BSD-3-Clause
//
// The fix-up: how the workers that share an output complete it. Each leaves the partial state of
// its tiles in a slot of its own and arrives at a counter; whoever arrives last merges. Nobody
// waits, so workers may run in any order, also one after the other.
//
// The states are merged in the order of the parts, never in the order of arrival. A few
// contributors are merged at once; many in groups of kRadix consecutive ones, whose last arriver
// leaves the merged state in the slot of the group's first contributor and arrives for the group
// one level up. Groups are aligned and kRadix is a power of two: if a merge is the canonical one of
// softmax_state.h, the result has the bits of a single merge.
#pragma once

#include <cstdint>

#include "host_device.h"
#include "partition.h"

namespace tree_attention {

constexpr int kRadixBits = 4;
constexpr int64_t kRadix = 1 << kRadixBits;

// The most parts that one worker merges at once. Where 264 resident CTAs (two on each of 132 SMs)
// work on eight outputs, at most 34 share one. Beyond, reading all parts alone takes a worker
// longer than a second level does, and so do parts of many rows beyond kRadix
// (benchmarks/cuda/predict.py).
constexpr int64_t kMaxMergedParts = 36, kMaxMergedRows = 8;

TREE_ATTENTION_HOST_DEVICE int64_t max_merged_parts(int64_t num_rows) {
  return num_rows <= kMaxMergedRows ? kMaxMergedParts : kRadix;
}

// A worker leaves at most two partial states: of an output that an earlier worker began, and of the
// output that it begins and leaves to others. Hence 2 * num_workers slots, whatever the number of
// outputs, and as many counters.
TREE_ATTENTION_HOST_DEVICE int64_t num_partial_slots(int64_t num_workers) {
  return 2 * num_workers;
}

TREE_ATTENTION_HOST_DEVICE int64_t partial_slot(int64_t worker, bool begins_output) {
  return 2 * worker + begins_output;
}

TREE_ATTENTION_HOST_DEVICE int64_t partial_slot(const Contributors& workers, int64_t part) {
  return partial_slot(workers.first + part, part == 0);
}

// A merge of `count` parts of an output, first, first + stride, ..., into the slot of the first
// one, or, where these are all parts that are left, into the output.
struct MergeStep {
  int64_t first, stride, count;
  bool completes_output;
};

// Called by each of two or more contributors with its index after it has stored its state.
// arrive(counter, expected) counts one more arrival at a counter that begins at zero and releases
// what the caller has stored; it returns true to the last of `expected`, which has then acquired
// what the others stored. merge_parts(step) merges the parts of the step in their order; these are
// at most `max_merged`, which is the same for all contributors and at least kRadix.
template <typename Arrive, typename MergeParts>
TREE_ATTENTION_HOST_DEVICE void fix_up(const Contributors& workers, int64_t part, Arrive arrive,
                                       MergeParts merge_parts,
                                       int64_t max_merged = kMaxMergedParts) {
  for (int level = 0;; ++level) {
    const int stride_bits = level * kRadixBits, group_bits = stride_bits + kRadixBits;
    const int64_t num_parts = ((workers.count - 1) >> stride_bits) + 1;
    const bool is_top = num_parts <= max_merged;
    const int64_t first = is_top ? 0 : part >> group_bits << group_bits;
    const int64_t rest = num_parts - (first >> stride_bits);
    const int64_t count = is_top || rest < kRadix ? rest : kRadix;
    if (count > 1) {
      // A group of more than one part at this level has more than kRadix^level contributors, so
      // that the counter is in its contributors' slots; its index modulo kRadix tells the level.
      if (!arrive(partial_slot(workers, first + level), count)) return;
      merge_parts(MergeStep{first, int64_t{1} << stride_bits, count, is_top});
    }
    if (is_top) return;
  }
}

}  // namespace tree_attention
