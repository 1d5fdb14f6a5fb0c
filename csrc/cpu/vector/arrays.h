// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstddef>
#include <cstdint>

namespace tree_attention::cpu {
namespace {

// Cuts memory into arrays. Where there is none yet, it tells how much they take.
class Arrays {
 public:
  explicit Arrays(void* memory) : begin_(reinterpret_cast<uintptr_t>(memory)), end_(begin_) {}

  template <typename T>
  void take(T*& array, int64_t size) {
    array = reinterpret_cast<T*>(end_);
    end_ += size * sizeof(T);
  }
  size_t bytes() const { return end_ - begin_; }

 private:
  const uintptr_t begin_;
  uintptr_t end_;
};

}  // namespace
}  // namespace tree_attention::cpu
