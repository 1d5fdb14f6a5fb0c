// SPDX-License-Identifier: BSD-3-Clause
//
// Which kernels exist, and the way from run-time values to one of them.
#pragma once

#include "tile_config.cuh"

namespace tree_attention::cuda {

// Calls f.template operator()<Element, head_dim bucket>() for the kernels of these tensors.
template <typename Element, typename F>
auto with_head_dim(int head_dim, F f) {
  if (head_dim <= 64) return f.template operator()<Element, 64>();
  if (head_dim <= 96) return f.template operator()<Element, 96>();
  if (head_dim <= 128) return f.template operator()<Element, 128>();
  return f.template operator()<Element, 256>();
}

template <typename F>
auto with_instance(DataType dtype, int head_dim, F f) {
  return with_dtype(dtype, [&]<typename Element>() { return with_head_dim<Element>(head_dim, f); });
}

// The most packed rows that share one reading of keys and values. 16 are enough for one query of
// up to 16 heads; steps of several queries have more. float32 has no tensor cores; 128 rows of 256
// columns do not fit the registers of 256 threads.
template <typename Element, int kHeadDim>
constexpr int kMaxRowTile = sizeof(Element) == 4 ? 16
                            : kHeadDim > 128     ? 64
                                                 : 128;

// Calls f.template operator()<TileConfig>() for the smallest row tile of at least `num_rows`, or
// the largest there is.
template <typename Element, int kHeadDim, int kRows = 16, typename F>
auto with_row_tile(int64_t num_rows, F f) {
  if constexpr (kRows < kMaxRowTile<Element, kHeadDim>) {
    if (num_rows > kRows) return with_row_tile<Element, kHeadDim, 2 * kRows>(num_rows, f);
  }
  return f.template operator()<TileConfig<Element, kHeadDim, kRows>>();
}

}  // namespace tree_attention::cuda
