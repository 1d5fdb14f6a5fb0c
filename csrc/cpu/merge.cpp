// SPDX-License-Identifier: BSD-3-Clause
#include "merge.h"

#include <algorithm>
#include <vector>

#include "cpu/converting.h"
#include "cpu/merge_rows.h"
#include "cpu/parallel.h"

namespace tree_attention::cpu {
namespace {

constexpr int64_t kGrain =
    32768;  // values of a thread; waking another one for fewer costs more than it gains

template <typename In, typename Out>
void merge_rows(const MergeParams& p) {
  const int64_t grain =
      std::max<int64_t>(1, kGrain / (p.num_parts * std::max<int64_t>(1, p.head_dim)));
  parallel_for(0, p.num_rows, grain, [&](int64_t row_begin, int64_t row_end) {
    std::vector<float> stack;  // [slots, head_dim], grown by the deepest slot
    float lse[kMaxMergeSlots];
    const auto slot_values = [&](int slot) { return stack.data() + slot * p.head_dim; };
    for (int64_t row = row_begin; row < row_end; ++row) {
      const auto load = [&](int64_t part, int slot) {
        if (static_cast<int64_t>(stack.size()) < (slot + 1) * p.head_dim) {
          stack.resize((slot + 1) * p.head_dim);
        }
        lse[slot] = p.lse_parts[part * p.lse_stride[0] + row * p.lse_stride[1]];
        const In* o =
            static_cast<const In*>(p.o_parts) + part * p.o_stride[0] + row * p.o_stride[1];
        // A lone empty part is not merged with anything: its `o` is left out here.
        if (lse[slot] == -INFINITY) {
          std::fill_n(slot_values(slot), p.head_dim, 0.0f);
        } else {
          std::copy_n(o, p.head_dim, slot_values(slot));
        }
      };
      const auto merge_slots = [&](int a, int b) {
        const Merge merged = merge(lse[a], lse[b]);
        lse[a] = merged.lse;
        merge_row(merged, slot_values(a), slot_values(b), slot_values(a), p.head_dim);
      };
      merge_in_canonical_order(p.num_parts, load, merge_slots);
      p.lse[row] = lse[0];
      std::copy_n(stack.data(), p.head_dim, static_cast<Out*>(p.o) + row * p.head_dim);
    }
  });
}

}  // namespace

void merge_states(const MergeParams& params) {
  with_dtype(params.dtype, [&]<typename In>() {
    with_dtype(params.out_dtype, [&]<typename Out>() {
      merge_rows<typename Converting<In>::type, typename Converting<Out>::type>(params);
    });
  });
}

}  // namespace tree_attention::cpu
