// SPDX-License-Identifier: BSD-3-Clause
//
// Memory that begins at a cache line.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <memory>
#include <new>

namespace tree_attention::cpu {

struct Free {
  void operator()(void* memory) const { std::free(memory); }
};
using AlignedMemory = std::unique_ptr<char, Free>;

constexpr size_t kAlignment = 64;

constexpr size_t aligned(size_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

inline AlignedMemory aligned_memory(size_t bytes) {
  AlignedMemory memory(static_cast<char*>(std::aligned_alloc(kAlignment, aligned(bytes))));
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

}  // namespace tree_attention::cpu
