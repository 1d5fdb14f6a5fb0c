// SPDX-License-Identifier: BSD-3-Clause
#include "ablations.h"

#include <algorithm>

#include "equal_splits.cuh"
#include "waiting_fixup.cuh"

namespace tree_attention::ablations {
namespace {

using namespace cuda;

int num_outputs(const DecodeParams& p) { return p.batch * p.num_heads_kv; }

// Calls f.template operator()<TileConfig>() for the tile that lean_decode takes.
template <typename F>
cudaError_t with_config(const DecodeParams& p, const F& f) {
  const int head_dim = std::max(p.head_dim, p.head_dim_v);
  if (head_dim <= 64) return f.template operator()<TileConfig<BFloat16, 64, 8>>();
  return f.template operator()<TileConfig<BFloat16, 128, 8>>();
}

}  // namespace

Plan plan_equal_splits(const DecodeParams& p, const DeviceLimits& limits) {
  Plan plan = plan_lean_decode(p, limits);
  const int resident = plan.blocks_per_sm * limits.num_sms;
  const int splits = std::clamp<int>(resident / num_outputs(p), 1, kMaxMergedParts);
  plan.num_workers = num_outputs(p) * splits;
  const int64_t slots = num_partial_slots(plan.num_workers);
  plan.workspace = {slots, slots * plan.row_tile * (p.head_dim_v + 1)};
  return plan;
}

cudaError_t launch_equal_splits(const DecodeParams& p, const Plan& plan, const Workspace& workspace,
                                cudaStream_t stream) {
  const SplitParams params{launch_params(p, plan, workspace), plan.num_workers / num_outputs(p)};
  return with_config(p, [&]<typename Config>() {
    const cudaError_t error = launch_kernel(equal_splits_kernel<BFloat16, Config>, plan.num_workers,
                                            Config::kThreads, plan.shared_bytes, stream, params);
    if (error != cudaSuccess) return error;
    return launch_kernel(merge_splits_kernel<Config>, num_outputs(p), Config::kThreads,
                         Config::shared_bytes(0), stream, params);
  });
}

cudaError_t launch_waiting_fixup(const DecodeParams& p, const Plan& plan,
                                 const Workspace& workspace, cudaStream_t stream) {
  return with_config(p, [&]<typename Config>() {
    return launch_kernel(waiting_fixup_kernel<BFloat16, Config>, plan.num_workers, Config::kThreads,
                         plan.shared_bytes, stream, launch_params(p, plan, workspace));
  });
}

}  // namespace tree_attention::ablations
