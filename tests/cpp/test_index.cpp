// SPDX-License-Identifier: BSD-3-Clause
//
// Queries, keys and choices lie in memory of just their size, so that sanitizers see what is read
// beside them. Numbers are small integers, whose scores are exact.
#include <ATen/Parallel.h>
#include <c10/util/BFloat16.h>

#include <algorithm>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "cpu/index/index.h"
#include "instruction_sets.h"

namespace {

using tree_attention::DataType;
using tree_attention::IndexParams;

using Choices = std::vector<std::pair<float, int32_t>>;

template <typename T>
std::vector<T> numbers(int64_t count, int64_t step) {
  std::vector<T> made;
  for (int64_t i = 0; i < count; ++i) made.push_back(static_cast<T>(float((i * step) % 7 - 3)));
  return made;
}

struct Case {
  int64_t seqlen_k, num_heads, head_dim;
  int32_t topk, block;
  bool is_weighted;
  int64_t num_workers;
};

// The first topk of [begin, end) by the score, and of equal scores by the slot.
template <typename T>
Choices chosen(const Case& c, const T* q, const T* k, const float* weights, int64_t head,
               int64_t begin, int64_t end) {
  Choices all;
  for (int64_t key = begin; key < end; ++key) {
    float score = 0;
    for (int64_t h = c.is_weighted ? 0 : head; h < (c.is_weighted ? c.num_heads : head + 1); ++h) {
      float product = 0;
      for (int64_t i = 0; i < c.head_dim; ++i) {
        product += float(q[h * c.head_dim + i]) * float(k[key * c.head_dim + i]);
      }
      score += c.is_weighted ? weights[h] * std::max(product, 0.f) : product;
    }
    const auto slot = static_cast<int32_t>(key / c.block);
    if (!all.empty() && all.back().second == slot) {
      all.back().first = std::max(all.back().first, score);
    } else {
      all.emplace_back(score, slot);
    }
  }
  std::stable_sort(all.begin(), all.end(), [](auto a, auto b) { return a.first > b.first; });
  all.resize(c.topk, {-std::numeric_limits<float>::infinity(), -1});
  return all;
}

template <typename T>
void check_index(const std::string& name, DataType dtype, const Case& c) {
  const int64_t batch = 2, seqlen_q = 3;
  const auto q = numbers<T>(batch * c.num_heads * seqlen_q * c.head_dim, 3);
  const auto k = numbers<T>(batch * c.seqlen_k * c.head_dim, 5);
  const auto weights = numbers<float>(batch * c.num_heads * seqlen_q, 2);
  std::vector<int32_t> ranges;
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t token = 0; token < seqlen_q; ++token) {
      ranges.push_back(static_cast<int32_t>(b * c.seqlen_k / 3));
      ranges.push_back(static_cast<int32_t>(c.seqlen_k - seqlen_q + 1 + token));
    }
  }
  IndexParams p{};
  p.dtype = dtype;
  p.batch = batch, p.seqlen_q = seqlen_q, p.seqlen_k = c.seqlen_k;
  p.num_heads = static_cast<int32_t>(c.num_heads);
  p.head_dim = static_cast<int32_t>(c.head_dim);
  p.q = q.data(), p.k = k.data();
  p.q_stride[0] = c.num_heads * seqlen_q * c.head_dim;
  p.q_stride[1] = seqlen_q * c.head_dim, p.q_stride[2] = c.head_dim;
  p.k_stride[0] = c.seqlen_k * c.head_dim, p.k_stride[1] = c.head_dim;
  if (c.is_weighted) {
    p.weights = weights.data();
    p.weights_stride[0] = c.num_heads * seqlen_q;
    p.weights_stride[1] = seqlen_q, p.weights_stride[2] = 1;
  }
  p.key_ranges = ranges.data();
  p.key_ranges_stride[0] = 2 * seqlen_q, p.key_ranges_stride[1] = 2;
  p.scale = 1;
  p.topk = c.topk, p.block = c.block, p.num_workers = c.num_workers;
  const int64_t rows = batch * p.num_choices() * seqlen_q;
  std::vector<float> scores(rows * c.topk);
  std::vector<int32_t> slots(rows * c.topk);
  p.scores = scores.data(), p.slots = slots.data();
  tree_attention::cpu::index_topk(p);
  std::vector<T> own_q(c.num_heads * c.head_dim);
  std::vector<float> own_weights(c.num_heads);
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t token = row % seqlen_q, head = row / seqlen_q % p.num_choices();
    const int64_t b = row / seqlen_q / p.num_choices();
    for (int64_t h = 0; h < c.num_heads; ++h) {
      const int64_t at = (b * c.num_heads + h) * seqlen_q + token;
      std::copy_n(q.data() + at * c.head_dim, c.head_dim, own_q.data() + h * c.head_dim);
      own_weights[h] = weights[at];
    }
    const int32_t* range = ranges.data() + (b * seqlen_q + token) * 2;
    const Choices expected = chosen(c, own_q.data(), k.data() + b * c.seqlen_k * c.head_dim,
                                    own_weights.data(), head, range[0], range[1]);
    for (int32_t i = 0; i < c.topk; ++i) {
      CHECK(slots[row * c.topk + i] == expected[i].second &&
                scores[row * c.topk + i] == expected[i].first,
            name, ", ", c.seqlen_k, " keys, ", c.num_heads, " heads, row ", row, ", place ", i,
            ": slot ", slots[row * c.topk + i], " with ", scores[row * c.topk + i], ", not ",
            expected[i].second, " with ", expected[i].first);
    }
  }
}

}  // namespace

void test_index() {
  const std::vector<std::string> names = tree_attention::testing::instruction_sets();
  for (const std::string& name : names) {
    tree_attention::cpu::set_instruction_set(name);
    for (const int threads : {1, 3}) {
      at::set_num_threads(threads);
      for (const Case& c : {Case{3, 1, 8, 1, 1, true, 0}, Case{63, 5, 40, 7, 1, true, 0},
                            Case{130, 64, 128, 200, 1, true, 2}, Case{300, 17, 72, 16, 1, true, 5},
                            Case{300, 2, 33, 16, 1, false, 5}, Case{200, 3, 16, 9, 7, false, 3}}) {
        check_index<float>(name, DataType::kFloat32, c);
        check_index<c10::BFloat16>(name, DataType::kBFloat16, c);
      }
    }
  }
  tree_attention::cpu::set_instruction_set(names.front());
}

void test_merge_topk() {
  // Parts of 3 and 2 rows side by side, unsorted, with a slot that both have and one that is empty.
  const std::vector<float> scores = {1, 5, 2, 5, 0, 7, /**/ 3, 5, 4, 9, 0, 0};
  const std::vector<int32_t> slots = {4, 9, 0, 1, -1, 2, /**/ 6, 9, 7, 3, -1, 8};
  std::vector<float> found(2 * 4);
  std::vector<int32_t> named(2 * 4);
  tree_attention::MergeTopkParams p{};
  p.num_parts = 2, p.num_rows = 2, p.num_entries = 3, p.topk = 4;
  p.scores_parts = scores.data(), p.slots_parts = slots.data();
  p.scores_stride[0] = p.slots_stride[0] = 6;
  p.scores_stride[1] = p.slots_stride[1] = 3;
  p.scores_stride[2] = p.slots_stride[2] = 1;
  p.scores = found.data(), p.slots = named.data();
  tree_attention::cpu::merge_topk(p);
  CHECK((named == std::vector<int32_t>{9, 7, 6, 0, 3, 2, 1, 8}), named[0], ' ', named[1]);
  CHECK((found == std::vector<float>{5, 4, 3, 2, 9, 7, 5, 0}), found[0], ' ', found[1]);
}
