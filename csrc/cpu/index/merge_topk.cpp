// SPDX-License-Identifier: BSD-3-Clause
#include <c10/util/Exception.h>

#include <algorithm>
#include <functional>
#include <vector>

#include "cpu/index/choice.h"
#include "cpu/index/index.h"
#include "cpu/parallel.h"

namespace tree_attention::cpu {
namespace {

constexpr int64_t kGrain = 16384;  // entries of a thread: fewer cost less than waking another one

// The entries of a part of a row, sorted if they are not.
void read_part(const MergeTopkParams& p, int64_t part, int64_t row, std::vector<Entry>& entries,
               std::vector<Entry>& memory) {
  const float* scores = p.scores_parts + part * p.scores_stride[0] + row * p.scores_stride[1];
  const int32_t* slots = p.slots_parts + part * p.slots_stride[0] + row * p.slots_stride[1];
  entries.clear();
  bool is_sorted = true;
  for (int64_t i = 0; i < p.num_entries; ++i) {
    const int32_t slot = slots[i * p.slots_stride[2]];
    TORCH_CHECK_VALUE(slot >= -1, "merge_topk: slots must be at least -1, got ", slot);
    if (slot == -1) continue;
    const Entry entry = entry_of(scores[i * p.scores_stride[2]], slot);
    is_sorted &= entries.empty() || entry <= entries.back();
    entries.push_back(entry);
  }
  if (!is_sorted) sort_entries(entries, memory);
}

}  // namespace

void merge_topk(const MergeTopkParams& p) {
  const int64_t entries = std::max<int64_t>(1, p.num_parts * p.num_entries + p.topk);
  parallel_for(0, p.num_rows, std::max<int64_t>(1, kGrain / entries),
               [&](int64_t begin, int64_t end) {
                 std::vector<std::vector<Entry>> read(p.num_parts);
                 std::vector<Entry> memory;
                 std::vector<Part> parts;
                 NamedSlots named;
                 for (int64_t row = begin; row < end; ++row) {
                   parts.clear();
                   for (int64_t part = 0; part < p.num_parts; ++part) {
                     read_part(p, part, row, read[part], memory);
                     parts.push_back({read[part].data(), read[part].data() + read[part].size()});
                   }
                   Row result(p.scores + row * p.topk, p.slots + row * p.topk, p.topk);
                   const int64_t most = std::min<int64_t>(p.topk, p.num_parts * p.num_entries);
                   merge_parts(parts, most, named, [&](Entry entry) { result.add(entry); });
                   result.finish();
                 }
               });
}

}  // namespace tree_attention::cpu
