// SPDX-License-Identifier: BSD-3-Clause
//
// What the CUDA kernels ask of arguments beyond args/decode.cpp.
#pragma once

#include <array>
#include <cstdint>

#include "common/decode_params.h"
#include "cuda/decode/check_pages.cuh"

namespace tree_attention::cuda {

// Sizes of k and v without their columns, in the order of their strides: {batch, head, key}; of
// paged k and v {page, head, slot}.
inline std::array<int64_t, 3> sizes_of_keys(const DecodeParams& p) {
  if (p.page_table != nullptr) return {p.num_pages, p.num_heads_kv, p.page_size};
  return {p.batch, p.num_heads_kv, p.seqlen_k};
}

// Kernels are compiled for head_dims up to 256, and for latents of up to 576 columns whose first
// 512 are their values. They read q, k and v in pieces of 16 bytes.
void check_supported(const DecodeParams& params);

// `device` is the name of a device of compute capability major.minor.
void check_capability(const char* op, const char* device, int major, int minor);

// `needed` and `available` are sizes in bytes of one block's shared memory.
void check_shared_memory(const DecodeParams& params, int32_t needed, int32_t available);

// Blocks add the tiles of a kv head in 32 bits, and count those of their range of the line
// (decode/schedule.cuh). `num_workers` is the plan's.
void check_number_of_tiles(const DecodeParams& params, int32_t row_tile, int32_t tile_keys,
                           int32_t num_workers);

// Throws for the first bad page of `found` [batch, lists], in host memory.
void check_found_pages(const DecodeParams& params, const BadPage* found);

}  // namespace tree_attention::cuda
