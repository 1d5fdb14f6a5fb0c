// SPDX-License-Identifier: BSD-3-Clause
//
// The tile of the kernel for Hopper (lean_decode_wgmma.cuh): its shape, and where it lies in shared
// memory.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "common/decode_params.h"
#include "cuda/checks.h"
#include "cuda/matrix_descriptor.cuh"
#include "tile_config.cuh"

namespace tree_attention::cuda {

constexpr int kWgmmaTileKeys = 64, kWgmmaBoxColumns = 64, kMinWgmmaRunKeys = 16;

// The keys of a copy from pages of so many slots: as many neighbours of a tile as divide a page.
TREE_ATTENTION_HOST_DEVICE int keys_of_wgmma_run(int page_size) {
  const int power_of_two = page_size & -page_size;
  return power_of_two < kWgmmaTileKeys ? power_of_two : kWgmmaTileKeys;
}

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
  static constexpr bool kValuesInKeys = kHeadDim > 256;
  static constexpr int kValueColumns = kValuesInKeys ? 512 : kHeadDim;
  static constexpr bool kFormsClusters = false;
  static constexpr bool kUsesWgmma = true;

  static constexpr int kConsumerWarps = 4, kConsumers = 32 * kConsumerWarps;  // the first threads
  static constexpr int kThreads = kConsumers + 32;
  static constexpr int kWarps = kThreads / 32;
  // While one block has its softmax another one multiplies, if there is room for the registers of
  // both: of ten warps, three are on one of the four schedulers, with 168 registers of a thread.
  static constexpr int kMaxBlocks = kRows * kValueColumns <= 64 * 64 ? 2 : 1;

  static constexpr int kTileKeys = kWgmmaTileKeys;
  static constexpr int kBoxColumns = kWgmmaBoxColumns;
  static constexpr int kBoxBytes = kTileKeys * kBoxRowBytes;  // of K or V
  static constexpr int kQueryBoxBytes = kRows * kBoxRowBytes;
  static constexpr int kKeyBoxes = kHeadDim / kBoxColumns;
  static constexpr int kValueBoxes = kValueColumns / kBoxColumns;

  static constexpr int kMinRunKeys = kMinWgmmaRunKeys;
  static TREE_ATTENTION_HOST_DEVICE int keys_of_run(int page_size) {
    return keys_of_wgmma_run(page_size);
  }

  // A stage of the ring: the boxes of K, and then those of V, unless they are the first ones of K.
  static constexpr int kValues = kValuesInKeys ? 0 : kKeyBoxes * kBoxBytes;
  static constexpr int kStageBoxes = kKeyBoxes + (kValuesInKeys ? 0 : kValueBoxes);
  static constexpr int kStageBytes = kStageBoxes * kBoxBytes;
  static constexpr int kMaxStages = 4;

  // Offsets in dynamic shared memory, the ring last: its length is the plan's. Weights, [kRows] of
  // a tile's keys each, and statistics, [kConsumerWarps][kRows], take the place of the scratch
  // memory, which is for the end of an output.
  static constexpr int kQueries = 0;
  static constexpr int kScratch = kQueries + kKeyBoxes * kQueryBoxBytes;
  static constexpr int kWeights = kScratch;
  static constexpr int kStatistics = kWeights + kRows * kBoxRowBytes;
  static constexpr int kBarriers =
      std::max(kScratch + kFixupScratchBytes, kStatistics + kConsumerWarps * kRows * 4);
  static constexpr int kSchedule = kBarriers + 2 * kMaxStages * 8;
  static constexpr int kScheduleBytes = 512;  // lean_decode_wgmma.cuh asserts what it needs
  static constexpr int kRing = (kSchedule + kScheduleBytes + 1023) / 1024 * 1024;

  static constexpr int shared_bytes(int num_stages) { return kRing + num_stages * kStageBytes; }
};

// Rows of the smallest tile, and of the largest, with which o of latents fills the registers of
// four warps. Fewer rows than 17 of up to 128 columns are those of other kernels.
template <int kHeadDim>
constexpr int kMinWgmmaRows = kHeadDim > 256 ? 16 : 32;
template <int kHeadDim>
constexpr int kMaxWgmmaRows = 2 * kMinWgmmaRows<kHeadDim>;

// Calls f.template operator()<Config>() for the smallest tile of at least `num_rows` rows, or the
// largest there is.
template <typename Element, int kHeadDim, int kRows = kMinWgmmaRows<kHeadDim>, typename F>
auto with_wgmma_rows(int64_t num_rows, F f) {
  if constexpr (kRows < kMaxWgmmaRows<kHeadDim>) {
    if (num_rows > kRows) return with_wgmma_rows<Element, kHeadDim, 2 * kRows>(num_rows, f);
  }
  return f.template operator()<WgmmaConfig<Element, kHeadDim, kRows>>();
}

// Whether memory with these strides can have a tensor map. Only axes of one element may have
// strides that it cannot.
inline bool has_tensor_map(const DecodeParams& p, const int64_t (&strides)[3]) {
  const std::array<int64_t, 3> sizes = sizes_of_keys(p);
  for (int axis = 0; axis < 3; ++axis) {
    const int64_t bytes = strides[axis] * element_size(p.kv_dtype);
    const bool is_possible = bytes > 0 && bytes < int64_t{1} << 40;
    if (sizes[axis] < 1 || (sizes[axis] > 1 && !is_possible)) return false;
  }
  return true;
}

// Whether the kernel is for these tensors: latents, or 17 to 64 packed rows of up to 128 columns,
// of some keys that are contiguous or in pages of a multiple of 16 slots.
inline bool takes_wgmma(const DecodeParams& p) {
  if (element_size(p.dtype) != 2 || p.kv_dtype != p.dtype || p.seqlen_k == 0) return false;
  if (p.page_table != nullptr && p.page_size % kMinWgmmaRunKeys != 0) return false;
  if (!has_tensor_map(p, p.k_stride)) return false;
  if (p.head_dim > 256) return true;
  const int64_t rows = int64_t{p.group_size()} * p.seqlen_q;
  return std::max(p.head_dim, p.head_dim_v) <= 128 && 16 < rows && rows <= 64 &&
         has_tensor_map(p, p.v_stride);
}

template <typename Element, typename F>
auto with_wgmma_head_dim(int head_dim, F f) {
  if (head_dim <= 64) return f.template operator()<Element, 64>();
  if (head_dim <= 128) return f.template operator()<Element, 128>();
  return f.template operator()<Element, 576>();
}
// Calls f.template operator()<Element, head_dim bucket>() for tensors that the kernel is for.
template <typename F>
auto with_wgmma_instance(const DecodeParams& p, F f) {
  const int head_dim = std::max(p.head_dim, p.head_dim_v);
  if (p.dtype == DataType::kFloat16) return with_wgmma_head_dim<Float16>(head_dim, f);
  return with_wgmma_head_dim<BFloat16>(head_dim, f);
}

}  // namespace tree_attention::cuda
