// SPDX-License-Identifier: BSD-3-Clause
//
// The operators with the CUDA kernels on the emulated device: from the time of install() on, they
// take the place of the CPU's, so that the same tests check both.
#include <c10/util/env.h>
#include <torch/library.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "args/checks.h"
#include "args/host_values.h"
#include "cuda/append/append_kv.cuh"
#include "cuda/checks.h"
#include "cuda/decode/launch.h"
#include "cuda/merge/merge_states.cuh"
#include "cuda/one_shot/one_shot_args.h"
#include "cuda/ranges/split_ranges.cuh"
#include "machine.h"
#include "operators.h"
#include "tensor_core.h"

namespace tree_attention {
namespace {

cuda::DeviceLimits limits;

// Blocks that share an output do not always run side by side.
constexpr int kResidentBlocks = 3;

void check(cudaError_t error) {
  TORCH_CHECK(error == cudaSuccess, "the emulated device returned error ", static_cast<int>(error));
}

// One workspace for all launches, as on a stream: counters that a launch does not return to zero
// would spoil the next.
cuda::Workspace workspace(const cuda::WorkspaceSize& size) {
  static std::vector<uint32_t> counters;
  static std::vector<float> partials;
  TORCH_CHECK(std::all_of(counters.begin(), counters.end(), [](uint32_t x) { return x == 0; }),
              "the emulated device: a launch did not return its counters to zero");
  counters.resize(std::max<size_t>(counters.size(), size.num_counters), 0);
  partials.assign(size.num_partial_floats, NAN);
  return {counters.data(), partials.data()};
}

void check_pages(const DecodeParams& params) {
  std::vector<cuda::BadPage> found(params.batch * cuda::num_page_lists(params));
  check(cuda::launch_check_pages({params, found.data()}, nullptr));
  cuda::check_found_pages(params, found.data());
}

cuda::Plan checked_plan(const DecodeParams& params) {
  cuda::check_supported(params);
  if (params.page_table != nullptr) check_pages(params);
  const cuda::Plan plan = cuda::plan_lean_decode(params, limits);
  cuda::check_shared_memory(params, plan.shared_bytes, limits.shared_bytes_per_block);
  cuda::check_number_of_tiles(params, plan.row_tile, plan.tile_keys, plan.num_workers);
  return plan;
}

void emulated_check_decode(const DecodeParams& params) { checked_plan(params); }

void emulated_lean_decode(const DecodeParams& params) {
  const cuda::Plan plan = checked_plan(params);
  check(cuda::launch_lean_decode(params, plan, workspace(plan.workspace), nullptr));
}

std::tuple<int64_t, int64_t, bool> emulated_plan(const DecodeParams& params) {
  const cuda::Plan plan = cuda::plan_lean_decode(params, limits);
  int resident = 0;
  check(cuda::find_resident_blocks(params, plan, &resident));
  return {plan.blocks_per_sm, resident, plan.uses_wgmma};
}

void emulated_merge_states(const MergeParams& params) {
  check(cuda::launch_merge_states(params, nullptr));
}

void emulated_split_ranges(const RangeParams& params) {
  check(cuda::launch_split_ranges(params, nullptr));
}

void emulated_append_kv(const AppendParams& params) {
  if (c10::utils::check_env("TREE_ATTENTION_CHECK_PAGES") == true) check_slots(params);
  check(cuda::launch_append_kv(params, nullptr));
}

// Each rank has a stream of its own, and as many resident blocks as a GPU has for it.
void emulated_one_shot(cuda::OneShotParams& params) {
  check(cuda::launch_one_shot(params, reinterpret_cast<cudaStream_t>(params.control)));
}

std::unique_ptr<emulator::Streams> streams;

void begin_streams() {
  streams = std::make_unique<emulator::Streams>();
  emulator::options().resident_blocks = cuda::kOneShotMaxBlocks;
}

void run_streams() {
  const auto running = std::move(streams);
  running->run();
  emulator::options().resident_blocks = kResidentBlocks;
}

// While it exists, its kernels hide those that were registered before.
std::unique_ptr<torch::Library> library;

cuda::DeviceLimits make_limits(int64_t num_sms, int64_t shared_bytes_per_sm,
                               int64_t shared_bytes_per_block, bool has_clusters, bool has_wgmma) {
  return {static_cast<int32_t>(num_sms),
          static_cast<int32_t>(shared_bytes_per_sm),
          static_cast<int32_t>(shared_bytes_per_block),
          has_clusters,
          has_clusters,
          has_wgmma};
}

void install(int64_t seed, int64_t num_sms, int64_t shared_bytes_per_sm,
             int64_t shared_bytes_per_block, bool has_clusters, bool has_wgmma) {
  limits =
      make_limits(num_sms, shared_bytes_per_sm, shared_bytes_per_block, has_clusters, has_wgmma);
  emulator::options().seed = seed;
  emulator::options().resident_blocks = kResidentBlocks;
  emulator::options().shared_bytes_per_sm = shared_bytes_per_sm;
  library = std::make_unique<torch::Library>(torch::Library::IMPL, "tree_attention",
                                             c10::DispatchKey::CPU, __FILE__, __LINE__);
  library->impl(
      "lean_decode",
      LeanDecode<emulated_lean_decode, emulated_merge_states, emulated_split_ranges>::run);
  library->impl(
      "lean_decode.out",
      LeanDecode<emulated_lean_decode, emulated_merge_states, emulated_split_ranges>::run_out);
  library->impl("check_decode", CheckDecode<emulated_check_decode>::run);
  library->impl("cascade_decode", CascadeDecode<emulated_lean_decode, emulated_check_decode,
                                                emulated_merge_states, emulated_split_ranges>::run);
  library->impl("lean_decode_plan", lean_decode_plan<emulated_plan>);
  library->impl("merge_states", MergeStates<emulated_merge_states>::run);
  library->impl("merge_states.out", MergeStates<emulated_merge_states>::run_out);
  library->impl("append_kv", append_kv<emulated_append_kv>);
  library->impl("one_shot", cuda::one_shot<emulated_one_shot>);
}

void uninstall() { library.reset(); }

void set_tensor_core(int64_t block, int64_t extra_bits) {
  emulator::tensor_core() = {static_cast<int>(block), static_cast<int>(extra_bits)};
}

void check_capability(std::string op, std::string device, int64_t major, int64_t minor) {
  cuda::check_capability(op.c_str(), device.c_str(), static_cast<int>(major),
                         static_cast<int>(minor));
}

// (row tile, threads, blocks per SM, stages, bytes of shared memory) of kernels on a GPU.
std::vector<int64_t> plan(at::ScalarType dtype, at::ScalarType kv_dtype, int64_t head_dim,
                          int64_t num_rows, int64_t num_sms, int64_t shared_bytes_per_sm,
                          int64_t shared_bytes_per_block, bool has_clusters, bool has_wgmma) {
  DecodeParams params{};
  params.dtype = data_type(dtype, "plan", "dtype");
  params.kv_dtype = kv_data_type(kv_dtype, params.dtype);
  params.head_dim = params.head_dim_v = static_cast<int32_t>(head_dim);
  params.batch = params.num_heads_q = params.num_heads_kv = 1;
  params.seqlen_q = static_cast<int32_t>(num_rows);
  const cuda::Plan plan = cuda::plan_lean_decode(
      params,
      make_limits(num_sms, shared_bytes_per_sm, shared_bytes_per_block, has_clusters, has_wgmma));
  return {plan.row_tile, plan.num_threads, plan.blocks_per_sm, plan.num_stages, plan.shared_bytes};
}

// Of the calling process until now.
int64_t num_launches() { return emulator::counters().launches; }

}  // namespace

TORCH_LIBRARY(tree_attention_emulator, m) {
  m.def("install", install);
  m.def("uninstall", uninstall);
  m.def("set_tensor_core", set_tensor_core);
  m.def("begin_streams", begin_streams);
  m.def("run_streams", run_streams);
  m.def("plan", plan);
  m.def("num_launches", num_launches);
  m.def("check_capability", check_capability);
}

}  // namespace tree_attention
