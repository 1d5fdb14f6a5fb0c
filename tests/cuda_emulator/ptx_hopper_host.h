// SPDX-License-Identifier: BSD-3-Clause
//
// Host versions of the functions of csrc/cuda/ptx_hopper.h, where each is described.
#pragma once

#include <cstdint>
#include <source_location>

#include "hopper.h"

namespace tree_attention::cuda {

using std::source_location;

constexpr bool kHasWgmma = true;

inline void mbarrier_init(uint32_t barrier, uint32_t count,
                          source_location where = source_location::current()) {
  emulator::init_barrier(barrier, count, where);
}
inline void mbarrier_inval(uint32_t barrier, source_location where = source_location::current()) {
  emulator::end_barrier(barrier, where);
}
inline void fence_mbarrier_init() { emulator::fence_barriers(); }
inline void mbarrier_arrive(uint32_t barrier, source_location where = source_location::current()) {
  emulator::arrive_at_barrier(barrier, 0, where);
}
inline void mbarrier_arrive_expect_tx(uint32_t barrier, uint32_t bytes,
                                      source_location where = source_location::current()) {
  emulator::arrive_at_barrier(barrier, bytes, where);
}
inline bool mbarrier_try_wait_parity(uint32_t barrier, uint32_t parity,
                                     source_location where = source_location::current()) {
  return emulator::wait_for_phase(barrier, parity, where);
}

inline void fence_proxy_async() { emulator::fence_async_proxy(); }

inline void prefetch_tensormap(const CUtensorMap* map,
                               source_location where = source_location::current()) {
  emulator::use_tensor_map(map, where);
}
inline void cp_async_bulk_tensor_3d(uint32_t destination, const CUtensorMap* map, int32_t x,
                                    int32_t y, int32_t z, uint32_t barrier,
                                    source_location where = source_location::current()) {
  const int32_t coordinates[] = {x, y, z};
  emulator::begin_box_copy(destination, map, coordinates, 3, barrier, where);
}
inline void cp_async_bulk_tensor_4d(uint32_t destination, const CUtensorMap* map, int32_t x,
                                    int32_t y, int32_t z, int32_t w, uint32_t barrier,
                                    source_location where = source_location::current()) {
  const int32_t coordinates[] = {x, y, z, w};
  emulator::begin_box_copy(destination, map, coordinates, 4, barrier, where);
}
inline void cp_async_bulk(uint32_t destination, const void* source, uint32_t bytes,
                          uint32_t barrier, source_location where = source_location::current()) {
  emulator::begin_bulk_copy(destination, source, bytes, barrier, where);
}

inline void wgmma_fence(source_location where = source_location::current()) {
  emulator::fence_products(where);
}
inline void wgmma_commit_group(source_location where = source_location::current()) {
  emulator::commit_products(where);
}
template <int kPending>
void wgmma_wait_group(source_location where = source_location::current()) {
  emulator::wait_for_products(kPending, where);
}
template <int kCount>
void wgmma_pin(float (&)[kCount]) {}

template <int kCount>
void wgmma(float (&d)[kCount], emulator::Product product, const uint32_t* a,
           source_location where) {
  static_assert(kCount == 4 || kCount == 8 || kCount == 16 || kCount == 32 || kCount == 64);
  float* pointers[kCount];
  for (int i = 0; i < kCount; ++i) pointers[i] = &d[i];
  emulator::begin_product(product, pointers, a, where);
}
template <bool kTransposedA, int kCount>
void wgmma_m64k16_bf16(float (&d)[kCount], uint64_t a, uint64_t b, bool accumulate,
                       source_location where = source_location::current()) {
  wgmma(d, {true, kCount, kTransposedA, false, a, b, accumulate}, nullptr, where);
}
template <bool kTransposedA, int kCount>
void wgmma_m64k16_f16(float (&d)[kCount], uint64_t a, uint64_t b, bool accumulate,
                      source_location where = source_location::current()) {
  wgmma(d, {false, kCount, kTransposedA, false, a, b, accumulate}, nullptr, where);
}
template <int kCount>
void wgmma_m64k16_bf16(float (&d)[kCount], const uint32_t (&a)[4], uint64_t b, bool accumulate,
                       source_location where = source_location::current()) {
  wgmma(d, {true, kCount, false, true, 0, b, accumulate}, a, where);
}
template <int kCount>
void wgmma_m64k16_f16(float (&d)[kCount], const uint32_t (&a)[4], uint64_t b, bool accumulate,
                      source_location where = source_location::current()) {
  wgmma(d, {false, kCount, false, true, 0, b, accumulate}, a, where);
}

template <int kRegisters>
void setmaxnreg_inc(source_location where = source_location::current()) {
  emulator::set_registers(kRegisters, true, where);
}
template <int kRegisters>
void setmaxnreg_dec(source_location where = source_location::current()) {
  emulator::set_registers(kRegisters, false, where);
}

}  // namespace tree_attention::cuda
