// SPDX-License-Identifier: BSD-3-Clause
//
// Shapes of a tile and where it lies in shared memory: what the host's plan and the kernel agree
// on.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <type_traits>

#include "common/host_device.h"
#include "cuda/element.cuh"
#include "fragments.cuh"

namespace tree_attention::cuda {

// Size of the shared memory in which an output's parts are merged (fixup.cuh), aligned to 8 bytes.
constexpr int kFixupScratchBytes = 8192;

// Rows of a tile in shared memory. They lie end to end, their 16-byte chunks permuted so that the
// eight rows of a matrix that ldmatrix reads, or a row's chunks that a warp writes, fall into
// different banks.
template <int kBytes_>
struct TileRows {
  static constexpr int kBytes = kBytes_, kChunks = kBytes / 16;
  static_assert(kBytes % 16 == 0 && kChunks % 4 == 0);

  static TREE_ATTENTION_HOST_DEVICE int offset(int row, int chunk) {
    return row * kBytes + (chunk ^ turn(row)) * 16;
  }

  // The address of (row + rows, chunk + chunks), if `address` is the address of (row, chunk). No
  // bit may be set in both of the summands, and the tile must begin at a multiple of 128 bytes.
  static TREE_ATTENTION_HOST_DEVICE uint32_t moved(uint32_t address, int rows, int chunks) {
    const int low = chunks % kTurns;
    return (address ^ (turn(rows) ^ low) * 16) + rows * kBytes + (chunks - low) * 16;
  }

 private:
  static constexpr int kTurns = kChunks % 8 == 0 ? 8 : 4;

  static TREE_ATTENTION_HOST_DEVICE int turn(int row) {
    return kTurns == 8 ? row & 7 : row >> 1 & 3;
  }
};

// A warp owns 16 packed rows (the m of mma.m16n8k16), or with operands swapped 8 (its n). Warps
// whose keys are the same form a key group; the key groups of a block split each tile's keys, so
// that with up to 16 rows every byte of K and V is read from shared memory once. Inside a key
// group, column groups split head_dim where the o of 16 rows would fill a warp's registers.
template <typename Element, int kHeadDim_, int kRows_, typename Cached_ = Element>
struct TileConfig {
  using Cached = Cached_;                     // of keys and values, maybe of 8 bits
  static constexpr int kHeadDim = kHeadDim_;  // that is compiled; the call's may be smaller
  static constexpr int kRows = kRows_;        // packed rows of an output
  // Which rows and keys the scores of a thread belong to, and how many rows a warp has.
  using Fragments = std::conditional_t<kRows == 8, KeysByRows, RowsByKeys>;
  static constexpr int kWarpRows = Fragments::kRows;
  // More columns are those of latents: K has kHeadDim of them, and its first kValueColumns are V.
  static constexpr bool kValuesInKeys = kHeadDim > 256;
  static constexpr int kValueColumns = kValuesInKeys ? 512 : kHeadDim;  // of V and o
  static constexpr int kRowGroups = kRows / kWarpRows;
  static constexpr int kColumnGroups = kValuesInKeys && kRows == 16 ? 4 : kHeadDim > 128 ? 2 : 1;
  static constexpr int kGroupWarps = kRowGroups * kColumnGroups;  // of a key group
  static constexpr int kWarps = kGroupWarps > 4 ? 8 : 4;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kKeyGroups = kWarps / kGroupWarps;
  static constexpr int kWarpColumns = kValueColumns / kColumnGroups;  // of V and o
  // With more rows the latency of a merge, which clusters of blocks save, is little.
  static constexpr bool kFormsClusters = kRows <= 16;
  static constexpr bool kUsesWgmma = false;
  static constexpr int kMaxBlocks = kWarps == 4 ? 2 : 1;  // of a multiprocessor, by registers

  // The columns of q and K that a warp multiplies, in pieces of 16. Of latents column groups take
  // them in turn: equal parts would not begin at whole groups of the chunks that TileRows permutes.
  static constexpr int kWarpPieces = kHeadDim / 16 / kColumnGroups;
  static constexpr int kPieceStep = kValuesInKeys ? kColumnGroups : 1;  // from one to the next

  using QueryRows = TileRows<kHeadDim* static_cast<int>(sizeof(Element))>;
  using CachedRows = TileRows<kHeadDim* static_cast<int>(sizeof(Cached))>;

  // K and V of a tile take about 32 KB: with three stages and two blocks 128 KB are in flight on a
  // Hopper SM, four times what latency times bandwidth asks for. Of latents it is 36 KB.
  static constexpr int kTileKeys =
      kValuesInKeys ? 32 : std::bit_floor(16u * 1024 / CachedRows::kBytes);
  static constexpr int kGroupKeys = kTileKeys / kKeyGroups;  // keys of a tile for each key group
  static constexpr int kTileBytes = kTileKeys * CachedRows::kBytes;  // of K or of V
  static constexpr bool kHasScales = sizeof(Cached) == 1;
  static constexpr int kScaleBytes = kHasScales ? kTileKeys * 4 : 0;  // of K or of V

  // A stage of the ring: K, V, and the scales of both, which begin at these offsets.
  static constexpr int kKeyScales = (kValuesInKeys ? 1 : 2) * kTileBytes;
  static constexpr int kValueScales = kKeyScales + kScaleBytes;
  static constexpr int kStageBytes = kValueScales + kScaleBytes;

  // Queries of 16 bits move to registers, except with 64 rows of latents: there o fills them.
  // Others are read from shared memory for each tile, and the next output's queries need a place of
  // their own: where there is none, nothing of the next output is requested before this one ends.
  static constexpr bool kQueriesInRegisters = sizeof(Element) == 2 && kWarpColumns <= 128;
  static constexpr int kQuerySlots = sizeof(Element) == 2 ? 1 : 2;
  static constexpr bool kFetchesNextOutput = kQueriesInRegisters || kQuerySlots > 1;
  static constexpr int kQueryBytes = kRows * QueryRows::kBytes;

  // Products that column groups exchange: the products of a thread for 32 keys.
  static constexpr int kProductBytes = kColumnGroups > 1 ? kThreads * 64 : 0;
  static constexpr int kScratchBytes = std::max(kFixupScratchBytes, kProductBytes);
  static constexpr int kStatisticsBytes =
      kWarps * kWarpRows * (kHasScales ? 3 : 2) * 4;  // WarpStatistics
  static constexpr int kScheduleBytes = 512;          // schedule.cuh asserts what it needs

  // Offsets in dynamic shared memory, the ring last: its length is the plan's.
  static constexpr int kQueries = 0;
  static constexpr int kScratch = kQueries + kQuerySlots * kQueryBytes;
  static constexpr int kStatistics = kScratch + kScratchBytes;
  static constexpr int kSchedule = kStatistics + kStatisticsBytes;
  static constexpr int kRing = (kSchedule + kScheduleBytes + 127) / 128 * 128;

  static constexpr int shared_bytes(int num_stages) { return kRing + num_stages * kStageBytes; }
};

}  // namespace tree_attention::cuda
