// SPDX-License-Identifier: BSD-3-Clause
#include <atomic>
#include <stdexcept>
#include <vector>

#include "decode.h"
#include "decode_kernel.h"

namespace tree_attention::cpu {
namespace {

// Widest first.
std::vector<const Kernels*> supported_kernels() {
  std::vector<const Kernels*> supported;
#if defined(__x86_64__)
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512dq");
  if (avx512) supported.push_back(&avx512_kernels);
  if (avx2) supported.push_back(&avx2_kernels);
#endif
  supported.push_back(&portable_kernels);
  return supported;
}

std::atomic<const Kernels*>& current() {
  static std::atomic<const Kernels*> kernels{supported_kernels().front()};
  return kernels;
}

}  // namespace

const Kernels& kernels() { return *current().load(std::memory_order_relaxed); }

const char* instruction_set() { return kernels().name; }

void set_instruction_set(const std::string& name) {
  std::string names;
  for (const Kernels* candidate : supported_kernels()) {
    if (name == candidate->name) {
      current().store(candidate, std::memory_order_relaxed);
      return;
    }
    names += (names.empty() ? "" : ", ") + std::string(candidate->name);
  }
  throw std::invalid_argument("set_instruction_set: name must be one of " + names + ", got " +
                              name);
}

}  // namespace tree_attention::cpu
