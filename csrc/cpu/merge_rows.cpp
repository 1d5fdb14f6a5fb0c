// SPDX-License-Identifier: BSD-3-Clause
#include "cpu/merge_rows.h"

#include <algorithm>

#include "cpu/multiversioned.h"

namespace tree_attention::cpu {
namespace {

// fmaf has the same bits everywhere, but without an FMA instruction it is a library call per value.
MULTIVERSIONED void weighted_sum(float weight_a, const float* a, float weight_b, const float* b,
                                 float* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = __builtin_fmaf(weight_b, b[i], weight_a * a[i]);
}

}  // namespace

void merge_row(const Merge& merge, const float* a, const float* b, float* out, int64_t head_dim) {
  switch (merge.take) {
    case Merge::Take::kBoth:
      weighted_sum(merge.weight_a, a, merge.weight_b, b, out, head_dim);
      break;
    case Merge::Take::kA:
      if (out != a) std::copy_n(a, head_dim, out);
      break;
    case Merge::Take::kB:
      if (out != b) std::copy_n(b, head_dim, out);
      break;
    case Merge::Take::kNone:
      std::fill_n(out, head_dim, 0.0f);
      break;
  }
}

}  // namespace tree_attention::cpu
