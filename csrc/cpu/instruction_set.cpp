// SPDX-License-Identifier: BSD-3-Clause
#include <atomic>
#include <stdexcept>
#include <vector>

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

#if defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

#include "cpu/kernels.h"
#include "decode.h"

namespace tree_attention::cpu {
namespace {

#if defined(__x86_64__)
// The kernel saves tile registers only for a process that asked for them.
bool has_amx() {
#if defined(__linux__)
  constexpr unsigned kBits = 1u << 22 | 1u << 24 | 1u << 25;  // CPUID 7.0 EDX: bf16, tiles, int8
  unsigned eax, ebx, ecx, edx;
  if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return false;
  if ((edx & kBits) != kBits) return false;
  constexpr int kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}
#endif

#if defined(__aarch64__)
bool has_bfloat16_matrices() {
#if defined(__linux__)
  return (getauxval(AT_HWCAP2) & HWCAP2_BF16) != 0;
#else
  return false;
#endif
}
#endif

// The first one is used. Products of pairs of bfloat16 are for AMD: Intel's cores make half as many
// multiply-adds of them as of float32, and have AMX where they are new, which takes their place.
std::vector<const Kernels*> supported_kernels() {
  std::vector<const Kernels*> supported;
#if defined(__x86_64__)
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512dq");
  const bool avx512_bf16 =
      avx512 && __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512bf16");
  if (avx512_bf16 && has_amx()) supported.push_back(&amx_kernels);
  const bool is_intel = __builtin_cpu_is("intel");
  if (avx512 && is_intel) supported.push_back(&avx512_kernels);
  if (avx512_bf16) supported.push_back(&avx512_bf16_kernels);
  if (avx512 && !is_intel) supported.push_back(&avx512_kernels);
  if (avx2) supported.push_back(&avx2_kernels);
#elif defined(__aarch64__)
  if (has_bfloat16_matrices()) supported.push_back(&neon_bf16_kernels);
  supported.push_back(&neon_kernels);
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
