// SPDX-License-Identifier: BSD-3-Clause
//
// What is on its way: things that are due at a time.
#pragma once

#include <cstdint>
#include <queue>
#include <utility>
#include <vector>

template <typename T>
class DelayQueue {
 public:
  using Time = int64_t;  // nanoseconds of any clock

  bool empty() const { return waiting_.empty(); }
  size_t size() const { return waiting_.size(); }
  Time next_due() const { return waiting_.top().due; }

  void push(Time due, T thing) { waiting_.push({due, next_number_++, std::move(thing)}); }

  // The first of what is due, in the order of due times and, where these are equal, of arrival.
  bool pop(Time now, T& thing) {
    if (empty() || next_due() > now) return false;
    thing = std::move(const_cast<Entry&>(waiting_.top()).thing);  // it leaves at once
    waiting_.pop();
    return true;
  }

 private:
  struct Entry {
    Time due;
    uint64_t number;
    T thing;
    bool operator<(const Entry& other) const {  // std::priority_queue has the greatest on top
      return due != other.due ? due > other.due : number > other.number;
    }
  };
  std::priority_queue<Entry> waiting_;
  uint64_t next_number_ = 0;
};
