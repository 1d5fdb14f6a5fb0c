// SPDX-License-Identifier: BSD-3-Clause
//
// What an operator requires of the memory that it writes.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <initializer_list>
#include <limits>
#include <optional>

namespace tree_attention {

// An argument, and the addresses of its bytes.
class ArgumentMemory {
 public:
  ArgumentMemory(const char* name, const at::Tensor& tensor);
  ArgumentMemory(const char* name, const std::optional<at::Tensor>& tensor);

 private:
  friend void check_outputs(const char*, std::initializer_list<ArgumentMemory>,
                            std::initializer_list<ArgumentMemory>);
  bool overlaps(const ArgumentMemory& other) const;

  const char* name_;
  const at::Tensor* tensor_ = nullptr;  // null: not given
  // Without bytes, an empty range that meets no other.
  int64_t begin_ = std::numeric_limits<int64_t>::max(), end_ = 0;
};

// Refuses an output that has two elements at one place, or that shares memory with an input or with
// another output. Views that interleave share none.
void check_outputs(const char* op, std::initializer_list<ArgumentMemory> outputs,
                   std::initializer_list<ArgumentMemory> inputs);

}  // namespace tree_attention
