// SPDX-License-Identifier: BSD-3-Clause
//
// How copies of boxes and products of four warps (ptx_hopper.h) have a matrix of 16-bit elements in
// shared memory: in boxes of 64 columns, whose rows are 128 bytes one after the other, and in which
// chunks of 16 bytes change places so that eight rows use all banks ("swizzle of 128 bytes").
// A box begins at a multiple of 1,024 bytes.
#pragma once

#include <cstdint>

#include "common/host_device.h"
#include "device.h"

namespace tree_attention::cuda {

constexpr int kBoxRowBytes = 128;

// Where a row of a box has a byte, in bytes from the box.
TREE_ATTENTION_HOST_DEVICE constexpr int swizzled(int row, int byte) {
  return row * kBoxRowBytes + (byte ^ row % 8 * 16);
}

// PTX ISA 9.0, 9.7.15.5.1.2.2 (matrix descriptor): a matrix that begins at shared address `begin`,
// in which eight rows take kBoxRowBytes each and the next eight begin `stride_bytes` further on. Of
// a matrix whose rows have more than 64 columns, the next 64 begin `leading_bytes` further on; they
// matter only to a transposed one (m of a), since a product takes 16 of k.
//
// As k advances by 16, `begin` advances by 32 bytes within a box whose rows are m or n, and by 16
// rows, 2,048 bytes, in a transposed one.
TREE_ATTENTION_HOST_DEVICE constexpr uint64_t matrix_descriptor(uint32_t begin,
                                                                uint32_t stride_bytes = 1024,
                                                                uint32_t leading_bytes = 16) {
  constexpr uint64_t kSwizzleOf128Bytes = uint64_t{1} << 62;
  return kSwizzleOf128Bytes | uint64_t{stride_bytes >> 4} << 32 |
         uint64_t{leading_bytes >> 4} << 16 | (begin >> 4 & 0x3fff);
}

}  // namespace tree_attention::cuda
