// SPDX-License-Identifier: BSD-3-Clause
#include "ranges.h"

#include <algorithm>
#include <utility>
#include <vector>

namespace tree_attention::cpu {
namespace {

void split_query(const RangeParams& p, int64_t batch, int64_t token,
                 std::vector<std::pair<int32_t, int32_t>>& sorted) {
  sorted.clear();
  const int32_t* ranges = p.ranges + batch * p.ranges_stride[0] + token * p.ranges_stride[1];
  for (int64_t i = 0; i < p.num_ranges; ++i) {
    sorted.emplace_back(ranges[i * p.ranges_stride[2]], ranges[i * p.ranges_stride[2] + 1]);
  }
  std::sort(sorted.begin(), sorted.end());
  int32_t covered = sorted.front().first;
  for (int64_t i = 0; i < p.num_ranges; ++i) {
    int32_t* part = p.parts + ((i * p.batch + batch) * p.seqlen_q + token) * 2;
    part[0] = std::max(sorted[i].first, covered);
    part[1] = sorted[i].second;
    covered = std::max(covered, sorted[i].second);
  }
}

void repeat(const RangeParams& p, const RepeatedTensor& x, int64_t batch) {
  uint16_t* first = x.to + batch * x.size_of_sequence();
  uint16_t* to = first;
  for (int64_t i = 0; i < x.num_rows[0]; ++i) {
    for (int64_t j = 0; j < x.num_rows[1]; ++j, to += x.row_size) {
      const int64_t from = batch * x.stride[0] + i * x.stride[1] + j * x.stride[2];
      std::copy_n(x.from + from, x.row_size, to);
    }
  }
  for (int64_t i = 1; i < p.num_ranges; ++i) {
    std::copy_n(first, x.size_of_sequence(), first + i * p.batch * x.size_of_sequence());
  }
}

}  // namespace

void split_ranges(const RangeParams& p) {
  std::vector<std::pair<int32_t, int32_t>> sorted;
  for (int64_t batch = 0; batch < p.batch; ++batch) {
    for (int64_t token = 0; token < p.seqlen_q; ++token) split_query(p, batch, token, sorted);
    for (int32_t i = 0; i < p.num_repeated; ++i) repeat(p, p.repeated[i], batch);
    if (p.sequences == nullptr) continue;
    for (int64_t i = 0; i < p.num_ranges; ++i) {
      p.sequences[i * p.batch + batch] = static_cast<int32_t>(batch);
    }
  }
}

}  // namespace tree_attention::cpu
