// SPDX-License-Identifier: BSD-3-Clause
//
// The cp.async copies of one thread. Until a wait covers a copy its destination is NaN: a reader
// that does not wait finds NaN, and so does one whose buffer is filled again too early. The source
// is read at the beginning or at the end of a copy: both must find the same.
#pragma once

#include <cstddef>
#include <cstring>
#include <vector>

#include "sanitizers.h"

namespace tree_attention::emulator {

class AsyncCopies {
 public:
  // Copies num_bytes, then zeros up to `size`. `source` is not read if num_bytes is 0.
  void begin(char* destination, const void* source, int size, int num_bytes, bool read_now) {
    record(destination, source, size, num_bytes);
    const Hidden hidden;
    Copy& copy = copies_.emplace_back(Copy{destination, source, size, num_bytes, read_now, {}});
    if (read_now) read(copy);
    std::memset(destination, 0xff, size);
  }

  void commit() {
    const Hidden hidden;
    group_ends_.push_back(copies_.size());
  }

  // Completes all groups but the latest `pending`.
  void wait(size_t pending) {
    if (group_ends_.size() <= pending) return;
    const size_t groups = group_ends_.size() - pending;
    const size_t end = group_ends_[groups - 1];
    for (size_t i = 0; i < end; ++i) {
      Copy& copy = copies_[i];
      record(copy.destination, copy.source, copy.size, copy.num_bytes);
      const Hidden hidden;
      if (!copy.read) read(copy);
      std::memcpy(copy.destination, copy.data, copy.size);
    }
    const Hidden hidden;
    copies_.erase(copies_.begin(), copies_.begin() + end);
    group_ends_.erase(group_ends_.begin(), group_ends_.begin() + groups);
    for (size_t& group_end : group_ends_) group_end -= end;
  }

  bool empty() const { return copies_.empty(); }

 private:
  struct Copy {
    char* destination;
    const void* source;
    int size, num_bytes;
    bool read;
    unsigned char data[16];
  };

  static void record(char* destination, const void* source, int size, int num_bytes) {
    if (num_bytes != 0) record_read(source, num_bytes);
    record_write(destination, size);
  }

  static void read(Copy& copy) {
    if (copy.num_bytes != 0) std::memcpy(copy.data, copy.source, copy.num_bytes);
  }

  std::vector<Copy> copies_;
  std::vector<size_t> group_ends_;  // of the groups that have not arrived: a number of copies
};

}  // namespace tree_attention::emulator
