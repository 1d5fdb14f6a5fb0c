// SPDX-License-Identifier: BSD-3-Clause
//
// Host versions of the functions of csrc/cuda/ptx.h, where each is described.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <source_location>

#include "hopper.h"
#include "machine.h"

namespace tree_attention::cuda {

using std::source_location;

inline uint32_t shared_address(const void* pointer,
                               source_location where = source_location::current()) {
  return emulator::shared_address(pointer, where);
}

inline char* dynamic_shared_memory() { return emulator::shared_memory(); }

// One launch ends before the next begins.
inline void griddepcontrol_wait() {}
inline void griddepcontrol_launch_dependents() {}

inline void bar_sync(uint32_t barrier, uint32_t count,
                     source_location where = source_location::current()) {
  emulator::named_barrier(barrier, count, false, false, where);
}
inline bool bar_red_or(uint32_t barrier, uint32_t count, bool predicate,
                       source_location where = source_location::current()) {
  return emulator::named_barrier(barrier, count, true, predicate, where);
}

constexpr bool kHasClusters = true;
inline void barrier_cluster(source_location where = source_location::current()) {
  emulator::cluster_barrier(where);
}
inline uint32_t mapa(uint32_t address, uint32_t rank,
                     source_location where = source_location::current()) {
  return emulator::map_to_block(address, rank, where);
}
inline float ld_shared_cluster(uint32_t address,
                               source_location where = source_location::current()) {
  return *reinterpret_cast<const float*>(emulator::shared_bytes(address, 4, where));
}
inline void ld_shared_cluster_v4(float (&x)[4], uint32_t address,
                                 source_location where = source_location::current()) {
  const auto* const source =
      reinterpret_cast<const float*>(emulator::shared_bytes(address, 16, where));
  for (int i = 0; i < 4; ++i) x[i] = source[i];
}

inline void cp_async_16(uint32_t destination, const void* source, int num_bytes,
                        source_location where = source_location::current()) {
  emulator::note_request({source, num_bytes});
  emulator::begin_async_copy(destination, source, 16, num_bytes, where);
}

inline void cp_async_4(uint32_t destination, const void* source, int num_bytes,
                       source_location where = source_location::current()) {
  emulator::note_request({source, num_bytes});
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
uint32_t movmatrix_trans(uint32_t matrix, source_location where = source_location::current());
void mma_m16n8k16_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                       source_location where = source_location::current());
void mma_m16n8k16_f16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                      source_location where = source_location::current());

// .ftz: numbers below the smallest normal one are zero.
inline float flush_to_zero(float x) {
  return std::fabs(x) < std::numeric_limits<float>::min() ? std::copysign(0.0f, x) : x;
}
inline float ex2(float x) { return flush_to_zero(std::exp2(flush_to_zero(x))); }
inline float lg2(float x) { return flush_to_zero(std::log2(flush_to_zero(x))); }

// Bit 3 of a selector stands for copies of the byte's sign.
inline uint32_t prmt(uint32_t a, uint32_t b, uint32_t selectors) {
  const uint64_t bytes = uint64_t{b} << 32 | a;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t selector = selectors >> (4 * i);
    uint32_t byte = bytes >> (8 * (selector & 7)) & 0xff;
    if (selector & 8) byte = byte & 0x80 ? 0xff : 0;
    result |= byte << (8 * i);
  }
  return result;
}
template <uint32_t kSelectors>
uint32_t prmt(uint32_t a, uint32_t b) {
  return prmt(a, b, kSelectors);
}

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

inline void mov_halves(uint16_t (&halves)[2], uint32_t x) {
  for (int i = 0; i < 2; ++i) halves[i] = static_cast<uint16_t>(x >> 16 * i);
}

// The emulated device is one of compute capability 8.0; the function is for nvcc's PTX.
constexpr bool kConvertsFloat8 = false;
inline uint16_t cvt_f16_e4m3(uint8_t bits) {
  if ((bits & 0x7f) == 0x7f) return 0x7fff;
  // Of the same exponents float16 has the one that is 8 more.
  const uint16_t magnitude = static_cast<uint16_t>((bits & 0x7f) << 7);
  return static_cast<uint16_t>((bits & 0x80) << 8 | cvt_rn_f16(cvt_f32_f16(magnitude) * 0x1p8f));
}
inline uint32_t cvt_f16x2_e4m3x2(uint16_t bytes) {
  return uint32_t{cvt_f16_e4m3(static_cast<uint8_t>(bytes >> 8))} << 16 |
         cvt_f16_e4m3(static_cast<uint8_t>(bytes));
}

// A function of pairs of float16, by numbers that double holds without an error, as it does every
// product and every sum.
template <typename Function>
uint32_t of_pairs(Function function, auto... pairs) {
  const auto element = [&](int shift) {
    const auto of = [&](uint32_t pair) {
      return double{cvt_f32_f16(static_cast<uint16_t>(pair >> shift))};
    };
    return uint32_t{cvt_rn_f16(static_cast<float>(function(of(pairs)...)))};
  };
  return element(16) << 16 | element(0);
}
inline float cvt_f32_bf16(uint16_t bits) { return std::bit_cast<float>(uint32_t{bits} << 16); }
inline uint32_t add_f16x2(uint32_t a, uint32_t b) {
  return of_pairs([](double x, double y) { return x + y; }, a, b);
}
inline uint32_t fma_f16x2(uint32_t a, uint32_t b, uint32_t c) {
  return of_pairs([](double x, double y, double z) { return std::fma(x, y, z); }, a, b, c);
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
  emulator::require_global(aligned, where);
  for (int i = 0; i < 4; ++i) aligned[i] = x[i];
}

inline void st_global_v2(uint32_t* aligned, const uint32_t (&x)[2],
                         source_location where = source_location::current()) {
  if (reinterpret_cast<uintptr_t>(aligned) % 8 != 0) {
    emulator::fail("the destination of a store is no multiple of 8", where);
  }
  emulator::require_global(aligned, where);
  for (int i = 0; i < 2; ++i) aligned[i] = x[i];
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

// Of benchmarks/cuda/ablations/stamped.cuh.
inline uint64_t clock64_of_multiprocessor() { return emulator::clock(); }

}  // namespace tree_attention::cuda
