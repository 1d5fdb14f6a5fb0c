// SPDX-License-Identifier: BSD-3-Clause
#include <algorithm>

#include "ablations.h"
#include "cuda/decode/lean_decode.cuh"

namespace tree_attention::ablations {
namespace {

using namespace cuda;

// A TileConfig with another number of keys in a tile: it hides everything that depends on that.
template <typename Own, int kTileKeys_>
struct Resized : Own {
  static constexpr int kTileKeys = kTileKeys_;
  static constexpr int kGroupKeys = kTileKeys / Own::kKeyGroups;
  static constexpr int kTileBytes = kTileKeys * Own::CachedRows::kBytes;
  static constexpr int kStageBytes = 2 * kTileBytes;
  static constexpr int shared_bytes(int num_stages) {
    return Own::kRing + num_stages * kStageBytes;
  }
  static_assert(!Own::kHasScales);
};

// Calls f.template operator()<Config>() for the columns and keys of a tile, if two stages of it fit
// into a multiprocessor.
template <int kTileKeys, typename F>
cudaError_t with_columns(const DecodeParams& p, const F& f) {
  if (std::max(p.head_dim, p.head_dim_v) <= 64) {
    return f.template operator()<Resized<TileConfig<BFloat16, 64, 8>, kTileKeys>>();
  }
  if constexpr (kTileKeys <= 128) {
    return f.template operator()<Resized<TileConfig<BFloat16, 128, 8>, kTileKeys>>();
  }
  return cudaErrorInvalidValue;
}

template <typename F>
cudaError_t with_tile(const DecodeParams& p, int tile_keys, const F& f) {
  if (tile_keys == 64) return with_columns<64>(p, f);
  if (tile_keys == 128) return with_columns<128>(p, f);
  return with_columns<256>(p, f);
}

}  // namespace

Plan plan_tiles(const DecodeParams& p, const DeviceLimits& limits, int tile_keys, int num_stages) {
  Plan plan = plan_lean_decode(p, limits);
  plan.num_stages = num_stages;
  with_tile(p, tile_keys, [&]<typename Config>() {
    plan.shared_bytes = Config::shared_bytes(num_stages);
    plan.tile_keys = Config::kTileKeys;
    return cudaSuccess;
  });
  constexpr int kSystemSharedBytes = 1024;  // of each block
  const bool two = 2 * (plan.shared_bytes + kSystemSharedBytes) <= limits.shared_bytes_per_sm;
  plan.blocks_per_sm = two ? 2 : 1;
  plan.num_workers = p.num_workers > 0 ? p.num_workers : plan.blocks_per_sm * limits.num_sms;
  const int64_t slots = num_partial_slots(plan.num_workers);
  plan.workspace = {slots, slots * plan.row_tile * (p.head_dim_v + 1)};
  return plan;
}

cudaError_t launch_tiles(const DecodeParams& p, const Plan& plan, const Workspace& workspace,
                         cudaStream_t stream, int tile_keys) {
  return with_tile(p, tile_keys, [&]<typename Config>() {
    return launch_kernel(lean_decode_kernel<BFloat16, Config>, plan.num_workers, Config::kThreads,
                         plan.shared_bytes, stream, launch_params(p, plan, workspace));
  });
}

}  // namespace tree_attention::ablations
