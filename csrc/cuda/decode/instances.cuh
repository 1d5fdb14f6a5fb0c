// SPDX-License-Identifier: BSD-3-Clause
//
// Which kernels exist, and the way from run-time values to one of them.
#pragma once

#include "tile_config.cuh"

namespace tree_attention::cuda {

// Calls f.template operator()<Element, head_dim bucket, Cached>() for the kernels of these tensors.
// More than 256 columns are those of latents, whose values are their first 512 (checks.cpp).
template <typename Element, typename Cached, typename F>
auto with_head_dim(int head_dim, F f) {
  if (head_dim <= 64) return f.template operator()<Element, 64, Cached>();
  if (head_dim <= 128) return f.template operator()<Element, 128, Cached>();
  if constexpr (sizeof(Element) == 2 && sizeof(Cached) == 2) {
    if (head_dim > 256) return f.template operator()<Element, 576, Cached>();
  }
  return f.template operator()<Element, 256, Cached>();
}

// `kv_dtype` is `dtype`, or one of 8 bits where `dtype` has 16.
template <typename F>
auto with_instance(DataType dtype, DataType kv_dtype, int head_dim, F f) {
  return with_dtype(dtype, [&]<typename Element>() {
    if constexpr (sizeof(Element) == 2) {
      if (kv_dtype == DataType::kInt8) return with_head_dim<Element, Int8>(head_dim, f);
      if (kv_dtype == DataType::kFloat8) return with_head_dim<Element, Float8>(head_dim, f);
    }
    return with_head_dim<Element, Element>(head_dim, f);
  });
}

// The most packed rows that share one reading of keys and values. 16 are enough for one query of
// up to 16 heads; steps of several queries have more. float32 has no tensor cores; 128 rows of 256
// columns do not fit the registers of 256 threads, nor 64 of latents with their queries. Keys and
// values of 8 bits are half as long to read again.
template <typename Element, int kHeadDim, typename Cached>
constexpr int kMaxRowTile = sizeof(Element) == 4                    ? 16
                            : sizeof(Cached) == 1 || kHeadDim > 128 ? 64
                                                                    : 128;

// The fewest, where most steps of a model whose query heads share keys end. float32 has no tensor
// cores, and of latents as many heads as there are share keys.
template <typename Element, int kHeadDim>
constexpr int kMinRowTile = sizeof(Element) == 4 || kHeadDim > 256 ? 16 : 8;

// The next larger row tile. Fewer above 16 are compiled for keys and values of 8 bits and for
// latents.
template <int kRows, int kHeadDim, typename Cached>
constexpr int kNextRowTile =
    kRows * (kRows >= 16 && (sizeof(Cached) == 1 || kHeadDim > 256) ? 4 : 2);

// Calls f.template operator()<TileConfig>() for the smallest row tile of at least `num_rows`, or
// the largest there is.
template <typename Element, int kHeadDim, typename Cached,
          int kRows = kMinRowTile<Element, kHeadDim>, typename F>
auto with_row_tile(int64_t num_rows, F f) {
  if constexpr (kRows < kMaxRowTile<Element, kHeadDim, Cached>) {
    constexpr int kNext = kNextRowTile<kRows, kHeadDim, Cached>;
    if (num_rows > kRows) return with_row_tile<Element, kHeadDim, Cached, kNext>(num_rows, f);
  }
  return f.template operator()<TileConfig<Element, kHeadDim, kRows, Cached>>();
}

}  // namespace tree_attention::cuda
