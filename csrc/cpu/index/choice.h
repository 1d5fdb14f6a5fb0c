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

// Sorts entries, the larger ones first: by their bytes, from the lowest one on, which takes a third
// of the time of std::sort for 2,048 of them. Bytes that all have in common are left out.
inline void sort_entries(std::vector<Entry>& entries, std::vector<Entry>& memory) {
  constexpr int kBytes = sizeof(Entry), kValues = 256;
  constexpr size_t kFew = 128;
  if (entries.size() <= kFew) {
    std::sort(entries.begin(), entries.end(), std::greater<>());
    return;
  }
  uint32_t counts[kBytes][kValues] = {};
  for (const Entry entry : entries) {
    for (int byte = 0; byte < kBytes; ++byte) ++counts[byte][entry >> 8 * byte & 0xff];
  }
  memory.resize(entries.size());
  for (int byte = 0; byte < kBytes; ++byte) {
    uint32_t* const count = counts[byte];
    if (count[entries.front() >> 8 * byte & 0xff] == entries.size()) continue;
    uint32_t place = 0;
    for (int value = kValues - 1; value >= 0; --value) {
      const uint32_t number = count[value];
      count[value] = place;
      place += number;
    }
    for (const Entry entry : entries) memory[count[entry >> 8 * byte & 0xff]++] = entry;
    entries.swap(memory);
  }
}

// The first topk of all entries that it is offered, which differ in their slots. It keeps up to
// capacity(topk) + the entries of one offer, and drops those beyond topk when there are more.
class Choice {
 public:
  // At most `most` entries are offered in all, and at most `together` of them in one offer.
  Choice(int64_t topk, int64_t most, int64_t together) : topk_(topk) {
    // Memory that is never written takes none, but a vector that grows takes twice its size.
    entries_.reserve(std::min(capacity(topk) + together, most));
  }

  // Half as many again as are kept cost more to drop than twice as many; beyond 2^20 memory counts.
  static int64_t capacity(int64_t topk) { return topk + std::min<int64_t>(topk, 1 << 20); }

  void offer(float score, int32_t slot) {
    // First of floats, which is cheaper: false for NaN, which comes before all.
    if (score < least_score_) return;
    const Entry entry = entry_of(score, slot);
    if (entry > least_) entries_.push_back(entry);
  }

  // Scores of slots slot_of(i): once there are topk entries, most are not among the first, which
  // several tell in one comparison.
  template <typename SlotOf>
  void offer(const float* scores, int count, const SlotOf& slot_of) {
    constexpr int kTogether = 16;
    int i = 0;
    for (; i + kTogether <= count; i += kTogether) {
      int some = 0;
      for (int n = 0; n < kTogether; ++n) some |= !(scores[i + n] < least_score_);
      if (some == 0) continue;
      for (int n = 0; n < kTogether; ++n) offer(scores[i + n], slot_of(i + n));
    }
    for (; i < count; ++i) offer(scores[i], slot_of(i));
  }

  // Called after some offers.
  void keep_best() {
    if (static_cast<int64_t>(entries_.size()) >= capacity(topk_)) drop_rest();
  }

  // The first entries, at most topk, in their order.
  std::vector<Entry>& sorted() {
    if (static_cast<int64_t>(entries_.size()) > topk_) drop_rest();
    sort_entries(entries_, sorted_);
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
  std::vector<Entry> entries_, sorted_;
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

// Calls take(entry) for the first topk entries of the union. An entry whose slot an earlier entry
// has is left out. So a slot that is named twice keeps its largest score, which comes first.
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
