// SPDX-License-Identifier: BSD-3-Clause
#include "ablations.h"

#include <algorithm>

#include "lean_decode.cuh"

namespace tree_attention::cuda {
namespace {

// The second kernel of FlashDecoding: a block for each output.
template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    merge_splits_kernel(const __grid_constant__ LaunchParams params) {
  char* shared = dynamic_shared_memory();
  const DecodeParams& p = params.decode;
  const int num_heads_kv = p.num_heads_kv;
  Schedule<Config> schedule(params, shared + Config::kSchedule);
  const int num_splits = schedule.splits_of_unit(blockIdx.x / num_heads_kv, p.num_workers);
  if (num_splits == 1) return;  // stored already
  const OutputRows rows = schedule.rows(blockIdx.x / num_heads_kv, blockIdx.x % num_heads_kv);
  const PartialStates states(params.workspace.partials, Config::kRows, p.head_dim_v);
  const Contributors splits{int64_t{blockIdx.x} * p.num_workers, num_splits};
  PartsMerger<Config::kThreads>(states, splits, {0, 1, num_splits, true}, shared + Config::kScratch)
      .run(rows.count, OutputSink(params, rows));
}

int num_outputs(const DecodeParams& p) { return p.batch * p.num_heads_kv; }

template <Variant kVariant>
cudaError_t launch_variant(const LaunchParams& params, const Plan& plan, cudaStream_t stream) {
  const auto launch = [&]<typename Config>() {
    const cudaError_t error =
        launch_kernel(lean_decode_kernel<BFloat16, Config, kVariant>, plan.num_workers,
                      Config::kThreads, plan.shared_bytes, stream, params);
    if (error != cudaSuccess || kVariant != Variant::kEqualSplits) return error;
    return launch_kernel(merge_splits_kernel<Config>, num_outputs(params.decode), Config::kThreads,
                         Config::shared_bytes(0), stream, params);
  };
  return params.decode.head_dim <= 64 ? launch.template operator()<TileConfig<BFloat16, 64, 16>>()
                                      : launch.template operator()<TileConfig<BFloat16, 128, 16>>();
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
  LaunchParams params = launch_params(p, plan, workspace);
  params.decode.num_workers = plan.num_workers / num_outputs(p);
  return launch_variant<Variant::kEqualSplits>(params, plan, stream);
}

cudaError_t launch_waiting_fixup(const DecodeParams& p, const Plan& plan,
                                 const Workspace& workspace, cudaStream_t stream) {
  return launch_variant<Variant::kWaitingFixUp>(launch_params(p, plan, workspace), plan, stream);
}

}  // namespace tree_attention::cuda
