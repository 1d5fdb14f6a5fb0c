// SPDX-License-Identifier: BSD-3-Clause
//
// The best entries of a stream of scores, and of several such choices.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <limits>
#include <vector>

#include "common/entry.h"

namespace tree_attention::cpu {

// The first topk of all entries that it is offered, which differ in their slots. It keeps up to
// capacity(topk) + the entries of one offer, and drops those beyond topk when there are more.
class Choice {
 public:
  explicit Choice(int64_t topk) : topk_(topk) {}

  // Half as many again as are kept cost more to drop than twice as many; beyond 2^20 memory counts.
  static int64_t capacity(int64_t topk) { return topk + std::min<int64_t>(topk, 1 << 20); }

  void clear() {
    entries_.clear();
    least_ = kNoEntry;
    least_score_ = -std::numeric_limits<float>::infinity();
  }

  void offer(float score, int32_t slot) {
    // First of floats, which is cheaper: false for NaN, which comes before all.
    if (score < least_score_) return;
    const Entry entry = entry_of(score, slot);
    if (entry > least_) entries_.push_back(entry);
  }

  // Called after some offers.
  void keep_best() {
    if (static_cast<int64_t>(entries_.size()) >= capacity(topk_)) drop_rest();
  }

  // The first entries, at most topk, in their order.
  std::vector<Entry>& sorted() {
    if (static_cast<int64_t>(entries_.size()) > topk_) drop_rest();
    std::sort(entries_.begin(), entries_.end(), std::greater<>());
    return entries_;
  }

 private:
  void drop_rest() {
    const auto last = entries_.begin() + (topk_ - 1);
    std::nth_element(entries_.begin(), last, entries_.end(), std::greater<>());
    entries_.resize(topk_);
    least_ = *last;
    least_score_ = score_of(least_);
  }

  int64_t topk_;
  std::vector<Entry> entries_;
  Entry least_ = kNoEntry;  // entries up to it are no more among the first topk
  float least_score_ = -std::numeric_limits<float>::infinity();
};

// Slots that were named.
class NamedSlots {
 public:
  // For up to `count` slots.
  void clear(int64_t count) {
    size_t size = 16;
    while (size < 2 * static_cast<size_t>(count)) size *= 2;
    slots_.assign(size, -1);
  }

  // Whether the slot is named for the first time.
  bool add(int32_t slot) {
    const size_t mask = slots_.size() - 1;
    size_t place = (static_cast<uint32_t>(slot) * 0x9e3779b1u) & mask;
    for (; slots_[place] != -1; place = (place + 1) & mask) {
      if (slots_[place] == slot) return false;
    }
    slots_[place] = slot;
    return true;
  }

 private:
  std::vector<int32_t> slots_;
};

// A part of a union: entries in their order.
struct Part {
  const Entry *next, *end;
};

// Calls take(entry) for the first topk entries of the union, of which those with a slot that an
// earlier one has are left out: of a slot that is named twice the largest score comes first.
template <typename Take>
void merge_parts(std::vector<Part>& parts, int64_t topk, NamedSlots& named, const Take& take) {
  const auto comes_later = [](const Part& a, const Part& b) { return *a.next < *b.next; };
  std::erase_if(parts, [](const Part& part) { return part.next == part.end; });
  std::make_heap(parts.begin(), parts.end(), comes_later);
  named.clear(topk);
  for (int64_t taken = 0; taken < topk && !parts.empty();) {
    std::pop_heap(parts.begin(), parts.end(), comes_later);
    Part& first = parts.back();
    const Entry entry = *first.next++;
    if (named.add(slot_of(entry))) {
      take(entry);
      ++taken;
    }
    if (first.next == first.end) {
      parts.pop_back();
    } else {
      std::push_heap(parts.begin(), parts.end(), comes_later);
    }
  }
}

// A row of results, which is filled from its begin and then with no entries.
class Row {
 public:
  Row(float* scores, int32_t* slots, int64_t size)
      : scores_(scores), slots_(slots), scores_end_(scores + size), slots_end_(slots + size) {}

  void add(Entry entry) {
    *scores_++ = score_of(entry);
    *slots_++ = slot_of(entry);
  }
  void finish() {
    std::fill(scores_, scores_end_, -std::numeric_limits<float>::infinity());
    std::fill(slots_, slots_end_, -1);
  }

 private:
  float* scores_;
  int32_t* slots_;
  float* scores_end_;
  int32_t* slots_end_;
};

}  // namespace tree_attention::cpu
