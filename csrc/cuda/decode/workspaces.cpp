// SPDX-License-Identifier: BSD-3-Clause
#include "workspaces.h"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

namespace tree_attention::cuda {
namespace {

struct Allocation {
  Workspace workspace;
  WorkspaceSize size;
};

// All allocations of a stream, the largest last: captured graphs may still use the smaller ones.
using Allocations = std::vector<Allocation>;

struct Workspaces {
  std::mutex mutex;
  std::map<std::pair<c10::DeviceIndex, cudaStream_t>, Allocations> of_stream;
};

// The workspaces are never destroyed: at the end of the process the driver may be gone before them.
Workspaces& workspaces() {
  static auto* const all = new Workspaces;
  return *all;
}

size_t counter_bytes(const WorkspaceSize& size) {
  constexpr size_t kAlignment = 256;  // of the partial states behind the counters
  const size_t bytes = size.num_counters * sizeof(uint32_t);
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

// The memset has a stream of its own: the current one may be capturing, and the memset must not
// become part of the graph.
void zero_counters(const Allocation& allocation) {
  cudaStream_t stream;
  C10_CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  C10_CUDA_CHECK(
      cudaMemsetAsync(allocation.workspace.counters, 0, counter_bytes(allocation.size), stream));
  C10_CUDA_CHECK(cudaStreamSynchronize(stream));
  C10_CUDA_CHECK(cudaStreamDestroy(stream));
}

Allocation allocate(const WorkspaceSize& size) {
  const c10::cuda::CUDAStreamCaptureModeGuard guard(cudaStreamCaptureModeRelaxed);
  void* memory;
  C10_CUDA_CHECK(
      cudaMalloc(&memory, counter_bytes(size) + size.num_partial_floats * sizeof(float)));
  char* partials = static_cast<char*>(memory) + counter_bytes(size);
  const Allocation allocation{{static_cast<uint32_t*>(memory), reinterpret_cast<float*>(partials)},
                              size};
  zero_counters(allocation);
  return allocation;
}

WorkspaceSize larger(const WorkspaceSize& a, const WorkspaceSize& b) {
  return {std::max(a.num_counters, b.num_counters),
          std::max(a.num_partial_floats, b.num_partial_floats)};
}

}  // namespace

Workspace workspace_of(cudaStream_t stream, const DeviceLimits& limits,
                       const WorkspaceSize& needed) {
  Workspaces& all = workspaces();
  const std::lock_guard lock(all.mutex);
  Allocations& allocations = all.of_stream[{c10::cuda::current_device(), stream}];
  const WorkspaceSize existing = allocations.empty() ? WorkspaceSize{} : allocations.back().size;
  if (existing.num_counters < needed.num_counters ||
      existing.num_partial_floats < needed.num_partial_floats) {
    allocations.push_back(allocate(larger(existing, larger(needed, largest_workspace(limits)))));
  }
  return allocations.back().workspace;
}

void reset_workspaces() {
  Workspaces& all = workspaces();
  const std::lock_guard lock(all.mutex);
  for (const auto& [key, allocations] : all.of_stream) {
    const c10::cuda::CUDAGuard guard(key.first);
    C10_CUDA_CHECK(cudaDeviceSynchronize());
    for (const Allocation& allocation : allocations) zero_counters(allocation);
  }
}

}  // namespace tree_attention::cuda
