// SPDX-License-Identifier: BSD-3-Clause
//
// The tile of the kernel for Hopper (lean_decode_wgmma.cuh): its shape, and where it lies in shared
// memory.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/decode_params.h"
#include "cuda/matrix_descriptor.cuh"
#include "tile_config.cuh"

namespace tree_attention::cuda {

constexpr int kWgmmaTileKeys = 64, kWgmmaBoxColumns = 64;

// Four warps multiply together. Keys are the 64 lines of a product and packed rows its columns, so
// that no product is spent on rows that do not exist. One more thread requests the tiles.
//
// K, V and the queries lie in boxes of 64 columns (matrix_descriptor.cuh): K and V in boxes of a
// tile's keys, as copies write them, the queries in boxes of kRows rows.
template <typename Element, int kHeadDim_, int kRows_>
struct WgmmaConfig {
  using Cached = Element;
  static constexpr int kHeadDim = kHeadDim_, kRows = kRows_;
  // As in TileConfig.
  static constexpr bool kValuesInKeys = true;
  static constexpr int kValueColumns = 512;

  static constexpr int kConsumerWarps = 4, kConsumers = 32 * kConsumerWarps;  // the first threads
  static constexpr int kThreads = kConsumers + 32;
  static constexpr int kWarps = kThreads / 32;

  static constexpr int kTileKeys = kWgmmaTileKeys;
  static constexpr int kBoxColumns = kWgmmaBoxColumns;
  static constexpr int kBoxBytes = kTileKeys * kBoxRowBytes;  // of K or V
  static constexpr int kQueryBoxBytes = kRows * kBoxRowBytes;
  static constexpr int kKeyBoxes = kHeadDim / kBoxColumns;
  static constexpr int kValueBoxes = kValueColumns / kBoxColumns;
  static constexpr int kStageBytes = kKeyBoxes * kBoxBytes;  // of the ring
  static constexpr int kMaxStages = 6;

  // Offsets in dynamic shared memory, the ring last: its length is the plan's. Weights, [kRows] of
  // a tile's keys each, take the place of the scratch memory, which is for the end of an output.
  static constexpr int kQueries = 0;
  static constexpr int kScratch = kQueries + kKeyBoxes * kQueryBoxBytes;
  static constexpr int kWeights = kScratch;
  static_assert(kRows * kBoxRowBytes <= kFixupScratchBytes);
  static constexpr int kStatistics = kScratch + kFixupScratchBytes;  // [kConsumerWarps][kRows]
  static constexpr int kBarriers = kStatistics + kConsumerWarps * kRows * 4;
  static constexpr int kSchedule = kBarriers + 2 * kMaxStages * 8;
  static constexpr int kScheduleBytes = 512;  // lean_decode_wgmma.cuh asserts what it needs
  static constexpr int kRing = (kSchedule + kScheduleBytes + 1023) / 1024 * 1024;

  static constexpr int shared_bytes(int num_stages) { return kRing + num_stages * kStageBytes; }
};

// Calls f.template operator()<Config>() for the smallest tile of at least `num_rows` rows, or the
// largest there is: o of more would not fit the registers of four warps.
template <typename Element, int kHeadDim, int kRows = 16, typename F>
auto with_wgmma_rows(int64_t num_rows, F f) {
  if constexpr (kRows < 32) {
    if (num_rows > kRows) return with_wgmma_rows<Element, kHeadDim, 2 * kRows>(num_rows, f);
  }
  return f.template operator()<WgmmaConfig<Element, kHeadDim, kRows>>();
}

// Whether the kernel is for these tensors: latents of contiguous keys, of which there are some, in
// an order that a tensor map can have.
inline bool takes_wgmma(const DecodeParams& p) {
  if (element_size(p.dtype) != 2 || p.kv_dtype != p.dtype || p.head_dim <= 256) return false;
  if (p.page_table != nullptr || p.seqlen_k == 0) return false;
  const int64_t sizes[3] = {p.batch, p.num_heads_kv, p.seqlen_k};
  for (int axis = 0; axis < 3; ++axis) {
    const int64_t bytes = p.k_stride[axis] * element_size(p.kv_dtype);
    if (sizes[axis] > 1 && (bytes <= 0 || bytes >= int64_t{1} << 40)) return false;
  }
  return true;
}

// Calls f.template operator()<Element, head_dim bucket>() for tensors that the kernel is for.
template <typename F>
auto with_wgmma_instance(DataType dtype, F f) {
  if (dtype == DataType::kFloat16) return f.template operator()<Float16, 576>();
  return f.template operator()<BFloat16, 576>();
}

}  // namespace tree_attention::cuda
