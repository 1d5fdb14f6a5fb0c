// SPDX-License-Identifier: BSD-3-Clause
//
// The ablations as operators with lean_decode's schema.
#include <ATen/cuda/CUDAContext.h>
#include <torch/library.h>

#include <algorithm>
#include <string>

#include "ablations.h"
#include "cuda/checks.h"
#include "cuda/decode/workspaces.h"
#include "operators.h"

namespace tree_attention::ablations {
namespace {

using PlanFunction = Plan (*)(const DecodeParams&, const DeviceLimits&);
using LaunchFunction = cudaError_t (*)(const DecodeParams&, const Plan&, const Workspace&,
                                       cudaStream_t);

template <typename Launch>
void run_with(const DecodeParams& p, PlanFunction make_plan, const Launch& launch,
              bool forms_clusters = false) {
  cuda::check_supported(p);
  if (p.batch == 0 || p.seqlen_q == 0) return;
  const cudaDeviceProp& device = *at::cuda::getCurrentDeviceProperties();
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  int ptx_version = 0;
  if (forms_clusters) C10_CUDA_CHECK(cuda::find_ptx_version(&ptx_version));
  const DeviceLimits limits{device.multiProcessorCount,
                            static_cast<int32_t>(device.sharedMemPerMultiprocessor),
                            static_cast<int32_t>(device.sharedMemPerBlockOptin),
                            /*has_early_launches=*/false,
                            /*has_clusters=*/ptx_version >= 90};
  const Plan plan = make_plan(p, limits);
  const cuda::LeasedWorkspace leased = cuda::workspace_of(stream, false, limits, plan.workspace);
  C10_CUDA_CHECK(launch(p, plan, leased.workspace, stream));
}

template <PlanFunction make_plan, LaunchFunction launch>
void run(const DecodeParams& p) {
  TORCH_CHECK(p.dtype == DataType::kBFloat16 && p.kv_dtype == p.dtype &&
                  std::max(p.head_dim, p.head_dim_v) <= 128 &&
                  int64_t{p.group_size()} * p.seqlen_q <= 8,
              "lean_decode's ablations exist for bfloat16, a head_dim up to 128 and up to 8 query "
              "heads and tokens of a group");
  run_with(p, make_plan, launch);
}

// Refuses several ranges of a query: the ablations compare schedules for one.
template <typename Params>
void refuse_ranges(const Params&) {
  TORCH_CHECK(false, "lean_decode's ablations take one range of keys for each query");
}

template <PlanFunction make_plan, LaunchFunction launch>
using Ablation =
    LeanDecode<run<make_plan, launch>, refuse_ranges<MergeParams>, refuse_ranges<RangeParams>>;

// Where the launch of this thread's call leaves its stamps, [blocks, kEnd + 1, 2].
thread_local const at::Tensor* stamps_of_call = nullptr;

void run_stamped(const DecodeParams& p) {
  const at::Tensor& stamps = *stamps_of_call;
  const auto launch = [&](const DecodeParams& params, const Plan& plan, const Workspace& workspace,
                          cudaStream_t stream) {
    const int blocks = plan.num_workers * plan.cluster_size;
    TORCH_CHECK(stamps.scalar_type() == at::kLong && stamps.is_contiguous() &&
                    stamps.sizes().slice(1) == at::IntArrayRef({kEnd + 1, 2}) &&
                    stamps.size(0) >= blocks,
                "stamped: stamps must be a contiguous int64 tensor of shape [n, ", kEnd + 1,
                ", 2] with n >= ", blocks, ", got ", stamps.scalar_type(), " ", stamps.sizes());
    return launch_stamped(params, plan, workspace, stream,
                          static_cast<BlockStamps*>(stamps.data_ptr()));
  };
  TORCH_CHECK(p.dtype == DataType::kBFloat16 && p.kv_dtype == p.dtype,
              "stamped: exists for bfloat16 only");
  run_with(p, cuda::plan_lean_decode, launch, /*forms_clusters=*/true);
}

// An operator with stamps as its first argument.
template <auto op>
struct WithStamps;
template <typename... Args, std::tuple<at::Tensor, at::Tensor> (*op)(Args...)>
struct WithStamps<op> {
  static std::tuple<at::Tensor, at::Tensor> run(at::Tensor& stamps, Args... inputs) {
    stamps_of_call = &stamps;
    return op(inputs...);
  }
};

using Stamped = WithStamps<
    LeanDecode<run_stamped, refuse_ranges<MergeParams>, refuse_ranges<RangeParams>>::run>;

template <int kTileKeys, int kNumStages>
Plan plan_tile(const DecodeParams& p, const DeviceLimits& limits) {
  return plan_tiles(p, limits, kTileKeys, kNumStages);
}

template <int kTileKeys>
cudaError_t launch_tile(const DecodeParams& p, const Plan& plan, const Workspace& workspace,
                        cudaStream_t stream) {
  return launch_tiles(p, plan, workspace, stream, kTileKeys);
}

template <int kTileKeys, int kNumStages>
using Tile = Ablation<plan_tile<kTileKeys, kNumStages>, launch_tile<kTileKeys>>;

// Calls f(name, run) for each tile's operator.
template <typename F>
void for_each_tile(const F& f) {
  const auto of_keys = [&]<int kTileKeys>() {
    const std::string name = "keys_" + std::to_string(kTileKeys) + "_stages_";
    f(name + "2", Tile<kTileKeys, 2>::run);
    f(name + "3", Tile<kTileKeys, 3>::run);
    f(name + "4", Tile<kTileKeys, 4>::run);
  };
  of_keys.template operator()<64>();
  of_keys.template operator()<128>();
  of_keys.template operator()<256>();
}

}  // namespace

TORCH_LIBRARY(tree_attention_ablations, m) {
  m.def("equal_splits(" TREE_ATTENTION_DECODE_SCHEMA ") -> (Tensor o, Tensor lse)");
  m.def("waiting_fixup(" TREE_ATTENTION_DECODE_SCHEMA ") -> (Tensor o, Tensor lse)");
  m.def("stamped(Tensor(a!) stamps, " TREE_ATTENTION_DECODE_SCHEMA ") -> (Tensor o, Tensor lse)");
  for_each_tile([&](const std::string& name, auto) {
    m.def((name + "(" TREE_ATTENTION_DECODE_SCHEMA ") -> (Tensor o, Tensor lse)").c_str());
  });
}

TORCH_LIBRARY_IMPL(tree_attention_ablations, CUDA, m) {
  m.impl("equal_splits", Ablation<plan_equal_splits, launch_equal_splits>::run);
  m.impl("waiting_fixup", Ablation<cuda::plan_lean_decode, launch_waiting_fixup>::run);
  m.impl("stamped", Stamped::run);
  for_each_tile([&](const std::string& name, auto run) { m.impl(name.c_str(), run); });
}

}  // namespace tree_attention::ablations
