// SPDX-License-Identifier: BSD-3-Clause
//
// What the PTX functions of ptx_hopper_host.h do on the emulated device; see machine.h.
#pragma once

#include <cstdint>
#include <source_location>

#include "cuda.h"
#include "products.h"

namespace tree_attention::emulator {

// A named barrier of the block. Returns whether any thread gave true.
bool named_barrier(uint32_t number, uint32_t count, bool votes, bool predicate,
                   const std::source_location& where);

// Barriers in shared memory, by their addresses.
void init_barrier(uint32_t barrier, uint32_t count, const std::source_location& where);
void fence_barriers();
void arrive_at_barrier(uint32_t barrier, uint32_t bytes, const std::source_location& where);
// Waits; sometimes it returns false before the phase has ended.
bool wait_for_phase(uint32_t barrier, uint32_t parity, const std::source_location& where);

// The asynchronous proxy sees what the block's threads have written to shared memory until now.
void fence_async_proxy();

void begin_box_copy(uint32_t destination, const CUtensorMap* map, const int32_t (&coordinates)[4],
                    uint32_t barrier, const std::source_location& where);

// `d` has a pointer to each of this thread's accumulators.
void begin_product(const Product& product, float* const* d, const std::source_location& where);
void fence_products(const std::source_location& where);
void commit_products(const std::source_location& where);
void wait_for_products(int pending, const std::source_location& where);

}  // namespace tree_attention::emulator
