// SPDX-License-Identifier: BSD-3-Clause
//
// The bridge from the operators to the kernels: device, stream and workspace.
#include "ops_cuda.h"

#include <ATen/ops/from_blob.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/env.h>

#include <algorithm>
#include <map>
#include <mutex>

#include "append/append_kv.cuh"
#include "args/checks.h"
#include "args/empty_tensor.h"
#include "args/host_values.h"
#include "checks.h"
#include "decode/check_pages.cuh"
#include "decode/workspaces.h"
#include "merge/merge_states.cuh"
#include "ranges/split_ranges.cuh"

namespace tree_attention::cuda {
namespace {

// Asked of the runtime once for each device. ATen's context has them too, but its header needs the
// headers of cuBLAS, cuSPARSE and cuSOLVER, which a bare toolkit lacks.
const cudaDeviceProp& properties(c10::DeviceIndex index) {
  static std::mutex mutex;
  static auto* const known = new std::map<c10::DeviceIndex, cudaDeviceProp>;
  const std::lock_guard lock(mutex);
  const auto [found, is_new] = known->try_emplace(index);
  if (is_new) {
    const cudaError_t error = cudaGetDeviceProperties(&found->second, index);
    if (error != cudaSuccess) known->erase(found);
    C10_CUDA_CHECK(error);
  }
  return found->second;
}

const cudaDeviceProp& current_device(const char* op) {
  const cudaDeviceProp& device = properties(c10::cuda::current_device());
  check_capability(op, device.name, device.major, device.minor);
  return device;
}

#ifdef TREE_ATTENTION_WGMMA
constexpr bool kHasWgmmaKernels = true;
#else
constexpr bool kHasWgmmaKernels = false;
#endif

DeviceLimits limits_of(const cudaDeviceProp& device) {
  const bool is_hopper_or_later = device.major >= 9;
  int ptx_version = 0;
  if (is_hopper_or_later) C10_CUDA_CHECK(find_ptx_version(&ptx_version));
  return {device.multiProcessorCount,
          static_cast<int32_t>(device.sharedMemPerMultiprocessor),
          static_cast<int32_t>(device.sharedMemPerBlockOptin),
          is_hopper_or_later,
          ptx_version >= 90,
          kHasWgmmaKernels && device.major == 9 && device.minor == 0};
}

// Whether the host is to wait for what it checks: an unknown page or slot is an error of the call,
// as on the CPU.
bool is_debug_mode(const char* op) {
  if (c10::utils::check_env("TREE_ATTENTION_CHECK_PAGES") != true) return false;
  TORCH_CHECK(c10::cuda::currentStreamCaptureStatusMayInitCtx() == c10::cuda::CaptureStatus::None,
              op,
              ": TREE_ATTENTION_CHECK_PAGES=1 must not be set while a CUDA graph is captured: "
              "the check waits for the device");
  return true;
}

void check_pages(const DecodeParams& params, cudaStream_t stream) {
  const int64_t bytes = int64_t{params.batch} * num_page_lists(params) * sizeof(BadPage);
  const at::Tensor found = empty_tensor({bytes}, at::device(at::kCUDA).dtype(at::kByte));
  C10_CUDA_CHECK(
      launch_check_pages({params, reinterpret_cast<BadPage*>(found.data_ptr())}, stream));
  check_found_pages(params, reinterpret_cast<const BadPage*>(found.cpu().const_data_ptr()));
}

void check_slots_on_device(AppendParams params) {
  if (params.batch * params.tokens == 0) return;  // there may be no memory of theirs
  const at::Tensor slots =
      at::from_blob(const_cast<int64_t*>(params.slots), {params.batch, params.tokens},
                    params.slots_stride, at::device(at::kCUDA).dtype(at::kLong))
          .cpu();
  params.slots = elements<int64_t>(slots);
  std::copy_n(slots.strides().begin(), 2, params.slots_stride);
  check_slots(params);
}

// The plan of a call that nothing speaks against, on the current device.
Plan checked_plan(const DecodeParams& params, const DeviceLimits& limits,
                  const c10::cuda::CUDAStream& stream) {
  if (params.page_table != nullptr && is_debug_mode("lean_decode")) check_pages(params, stream);
  const Plan plan = plan_lean_decode(params, limits);
  check_shared_memory(params, plan.shared_bytes, limits.shared_bytes_per_block);
  check_number_of_tiles(params, plan.row_tile, plan.tile_keys, plan.num_workers);
  return plan;
}

}  // namespace

void check_decode(const DecodeParams& params) {
  check_supported(params);
  const DeviceLimits limits = limits_of(current_device("lean_decode"));
  checked_plan(params, limits, c10::cuda::getCurrentCUDAStream());
}

void lean_decode(const DecodeParams& params) {
  check_supported(params);
  const DeviceLimits limits = limits_of(current_device("lean_decode"));
  const c10::cuda::CUDAStream stream = c10::cuda::getCurrentCUDAStream();
  const Plan plan = checked_plan(params, limits, stream);
  // The id of a stream that is not torch's own is its handle, and that of the default one is 0.
  const bool lives = stream.id() != reinterpret_cast<c10::StreamId>(stream.stream());
  const LeasedWorkspace leased = workspace_of(stream, lives, limits, plan.workspace);
  C10_CUDA_CHECK(launch_lean_decode(params, plan, leased.workspace, stream));
}

std::tuple<int64_t, int64_t, bool> lean_decode_plan(const DecodeParams& params) {
  check_supported(params);
  const Plan plan = plan_lean_decode(params, limits_of(current_device("lean_decode")));
  int resident = 0;
  C10_CUDA_CHECK(find_resident_blocks(params, plan, &resident));
  return {plan.blocks_per_sm, resident, plan.uses_wgmma};
}

void merge_states(const MergeParams& params) {
  current_device("merge_states");
  C10_CUDA_CHECK(launch_merge_states(params, c10::cuda::getCurrentCUDAStream()));
}

void split_ranges(const RangeParams& params) {
  current_device("lean_decode");
  C10_CUDA_CHECK(launch_split_ranges(params, c10::cuda::getCurrentCUDAStream()));
}

void append_kv(const AppendParams& params) {
  current_device("append_kv");
  if (is_debug_mode("append_kv")) check_slots_on_device(params);
  C10_CUDA_CHECK(launch_append_kv(params, c10::cuda::getCurrentCUDAStream()));
}

void launch_one_shot(OneShotParams& params) {
  current_device("one_shot");
  void* host = nullptr;
  // This fails where the memory is not page-locked, which a kernel could not reach.
  C10_CUDA_CHECK(cudaHostGetDevicePointer(&host, params.host, 0));
  params.host = static_cast<OneShotHost*>(host);
  C10_CUDA_CHECK(launch_one_shot(params, c10::cuda::getCurrentCUDAStream()));
}

}  // namespace tree_attention::cuda
