// SPDX-License-Identifier: BSD-3-Clause
//
// Host versions of the functions of csrc/cuda/ptx_hopper.h, where each is described.
#pragma once

#include <cstdint>
#include <source_location>

#include "hopper.h"

namespace tree_attention::cuda {

using std::source_location;

inline void mbarrier_init(uint32_t barrier, uint32_t count,
                          source_location where = source_location::current()) {
  emulator::init_barrier(barrier, count, where);
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

inline void cp_async_bulk_tensor_4d(uint32_t destination, const CUtensorMap* map, int32_t x,
                                    int32_t y, int32_t z, int32_t w, uint32_t barrier,
                                    source_location where = source_location::current()) {
  const int32_t coordinates[] = {x, y, z, w};
  emulator::begin_box_copy(destination, map, coordinates, barrier, where);
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
void wgmma(float (&d)[kCount], const emulator::Product& product, source_location where) {
  static_assert(kCount == 8 || kCount == 16 || kCount == 32);
  float* pointers[kCount];
  for (int i = 0; i < kCount; ++i) pointers[i] = &d[i];
  emulator::begin_product(product, pointers, where);
}
template <bool kTransposedA, int kCount>
void wgmma_m64k16_bf16(float (&d)[kCount], uint64_t a, uint64_t b,
                       source_location where = source_location::current()) {
  wgmma(d, {true, kCount, kTransposedA, a, b}, where);
}
template <bool kTransposedA, int kCount>
void wgmma_m64k16_f16(float (&d)[kCount], uint64_t a, uint64_t b,
                      source_location where = source_location::current()) {
  wgmma(d, {false, kCount, kTransposedA, a, b}, where);
}

}  // namespace tree_attention::cuda
