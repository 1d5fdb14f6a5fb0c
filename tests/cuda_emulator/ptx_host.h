// SPDX-License-Identifier: BSD-3-Clause
//
// Host versions of the functions of csrc/cuda/ptx.h, where each is described.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <source_location>

#include "machine.h"

namespace tree_attention::cuda {

using std::source_location;

inline uint32_t shared_address(const void* pointer,
                               source_location where = source_location::current()) {
  return emulator::shared_address(pointer, where);
}

inline char* dynamic_shared_memory() { return emulator::shared_memory(); }

inline constexpr uint64_t kEvictFirst = 0x12f0000000000000;
inline uint64_t createpolicy_evict_first() { return kEvictFirst; }

inline void cp_async_16(uint32_t destination, const void* source, int num_bytes, uint64_t policy,
                        source_location where = source_location::current()) {
  if (policy != kEvictFirst) emulator::fail("not a cache policy", where);
  emulator::begin_async_copy(destination, source, 16, num_bytes, where);
}

inline void cp_async_4(uint32_t destination, const void* source, int num_bytes,
                       source_location where = source_location::current()) {
  emulator::begin_async_copy(destination, source, 4, num_bytes, where);
}

inline void cp_async_commit_group() { emulator::commit_async_copies(); }

template <int kPending>
void cp_async_wait_group(source_location where = source_location::current()) {
  emulator::wait_for_async_copies(kPending, where);
}

void ldmatrix_x4(uint32_t (&matrices)[4], uint32_t row,
                 source_location where = source_location::current());
void ldmatrix_x4_trans(uint32_t (&matrices)[4], uint32_t row,
                       source_location where = source_location::current());
void mma_m16n8k16_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                       source_location where = source_location::current());
void mma_m16n8k16_f16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                      source_location where = source_location::current());

// .ftz: numbers below the smallest normal one are zero.
inline float flush_to_zero(float x) {
  return std::fabs(x) < std::numeric_limits<float>::min() ? std::copysign(0.0f, x) : x;
}
inline float ex2(float x) { return flush_to_zero(std::exp2(flush_to_zero(x))); }

// A NaN becomes the canonical one.
inline uint16_t cvt_rn_bf16(float x) {
  if (std::isnan(x)) return 0x7fff;
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline uint16_t cvt_rn_f16(float x) {
  if (std::isnan(x)) return 0x7fff;
  return std::bit_cast<uint16_t>(static_cast<_Float16>(x));
}
inline uint32_t cvt_bf16x2(float low, float high) {
  return uint32_t{cvt_rn_bf16(high)} << 16 | cvt_rn_bf16(low);
}
inline uint32_t cvt_f16x2(float low, float high) {
  return uint32_t{cvt_rn_f16(high)} << 16 | cvt_rn_f16(low);
}
// _Float16 would be a call to the compiler's library for each number.
inline float cvt_f32_f16(uint16_t bits) {
  const uint32_t sign = (bits & 0x8000u) << 16, rest = (bits & 0x7fffu) << 13;
  if ((bits & 0x7c00) == 0x7c00) return std::bit_cast<float>(sign | rest | 0x7f800000);
  return std::bit_cast<float>(sign |
                              std::bit_cast<uint32_t>(std::bit_cast<float>(rest) * 0x1p112f));
}

// Of numbers that double holds without an error, as it does every product.
template <uint16_t (*round)(float), float (*value)(uint16_t)>
uint32_t fma_pairs_on_host(uint32_t a, uint32_t b, uint32_t c) {
  const auto element = [&](int shift) {
    const auto of = [&](uint32_t pair) { return value(static_cast<uint16_t>(pair >> shift)); };
    return uint32_t{round(static_cast<float>(std::fma(double{of(a)}, double{of(b)}, of(c))))};
  };
  return element(16) << 16 | element(0);
}
inline float cvt_f32_bf16(uint16_t bits) { return std::bit_cast<float>(uint32_t{bits} << 16); }
inline uint32_t fma_bf16x2(uint32_t a, uint32_t b, uint32_t c) {
  return fma_pairs_on_host<cvt_rn_bf16, cvt_f32_bf16>(a, b, c);
}
inline uint32_t fma_f16x2(uint32_t a, uint32_t b, uint32_t c) {
  return fma_pairs_on_host<cvt_rn_f16, cvt_f32_f16>(a, b, c);
}

inline uint32_t atomic_inc_acq_rel(uint32_t* counter, uint32_t limit,
                                   source_location where = source_location::current()) {
  emulator::switch_point(emulator::At::kAtomic, where);
  uint32_t old = __atomic_load_n(counter, __ATOMIC_RELAXED);
  while (!__atomic_compare_exchange_n(counter, &old, old >= limit ? 0 : old + 1, false,
                                      __ATOMIC_ACQ_REL, __ATOMIC_RELAXED)) {
  }
  emulator::switch_point(emulator::At::kAtomic, where);
  return old;
}

inline void st_global_v4(float* aligned, const float (&x)[4],
                         source_location where = source_location::current()) {
  if (reinterpret_cast<uintptr_t>(aligned) % 16 != 0) {
    emulator::fail("the destination of a store is no multiple of 16", where);
  }
  for (int i = 0; i < 4; ++i) aligned[i] = x[i];
}

// Of benchmarks/cuda/ablations/waiting_fixup.cuh.
inline uint32_t load_acquire(const uint32_t* address,
                             source_location where = source_location::current()) {
  emulator::switch_point(emulator::At::kAcquireLoad, where);
  return __atomic_load_n(address, __ATOMIC_ACQUIRE);
}

inline uint64_t load_acquire_system(const uint64_t* address,
                                    source_location where = source_location::current()) {
  emulator::switch_point(emulator::At::kAcquireLoad, where);
  return __atomic_load_n(address, __ATOMIC_ACQUIRE);
}

inline void store_release_system(uint64_t* address, uint64_t value,
                                 source_location where = source_location::current()) {
  emulator::switch_point(emulator::At::kAtomic, where);
  __atomic_store_n(address, value, __ATOMIC_RELEASE);
  emulator::switch_point(emulator::At::kAtomic, where);
}

inline uint64_t globaltimer() { return emulator::clock(); }

}  // namespace tree_attention::cuda
