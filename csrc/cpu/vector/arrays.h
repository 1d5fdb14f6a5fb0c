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

// What many rows keep from step to step, in the arrays of a call's memory.
struct RowArrays {
  float *acc, *total;        // sums of values: since the last flush, and before it
  double* sum;               // [rows], like the others: of all weights
  float *base, *total_base;  // weights are 2^(score - base); base at the last flush
  int32_t *begin, *end;      // the keys that a row sees: see key_blocks.h

  void take(Arrays& arrays, int64_t num_rows, int64_t columns) {
    arrays.take(acc, num_rows * columns);
    arrays.take(total, num_rows * columns);
    arrays.take(sum, num_rows);
    arrays.take(base, num_rows);
    arrays.take(total_base, num_rows);
    arrays.take(begin, num_rows);
    arrays.take(end, num_rows);
  }
};

}  // namespace
}  // namespace tree_attention::cpu
