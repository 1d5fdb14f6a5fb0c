// SPDX-License-Identifier: BSD-3-Clause
#include "workspaces.h"

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>

#include <algorithm>
#include <compare>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace tree_attention::cuda {
namespace {

struct Allocation {
  Workspace workspace;
  WorkspaceSize size;
};

// The largest last: captured graphs may still use the smaller ones.
using Allocations = std::vector<Allocation>;

// Launches that follow each other: those on a stream, or those that a capture records there.
struct Sequence {
  c10::DeviceIndex device;
  cudaStream_t stream;
  unsigned long long capture;  // 0: of no capture

  auto operator<=>(const Sequence&) const = default;
};

struct Owned {
  Allocations allocations;
  bool lives;  // the stream, as long as the process
};

struct Workspaces {
  std::mutex mutex;
  std::map<Sequence, Owned> used;
  std::map<c10::DeviceIndex, Allocations> idle;

  // Captures whose graphs are destroyed. They have a mutex that is never held while CUDA is called:
  // the thread that reports them may be one for which CUDA waits.
  std::mutex ended_mutex;
  std::vector<Sequence> ended;
};

// The workspaces are never destroyed: at the end of the process the driver may be gone before them.
Workspaces& workspaces() {
  static auto* const all = new Workspaces;
  return *all;
}

size_t counter_bytes(const WorkspaceSize& size) {
  constexpr size_t kAlignment = 256;  // of the partial states, which follow the counters
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

Allocation allocate(const WorkspaceSize& size, bool is_captured) {
  const c10::cuda::CUDAStreamCaptureModeGuard guard(cudaStreamCaptureModeRelaxed);
  void* memory;
  const size_t bytes = counter_bytes(size) + size.num_partial_floats * sizeof(float);
  cudaError_t error = cudaMalloc(&memory, bytes);
  if (error == cudaErrorMemoryAllocation && !is_captured) {
    // torch may hold all memory, and what it does not use. It waits for the device, which a capture
    // forbids.
    cudaGetLastError();
    c10::cuda::CUDACachingAllocator::emptyCache();
    error = cudaMalloc(&memory, bytes);
  }
  C10_CUDA_CHECK(error);
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

bool fits(const WorkspaceSize& needed, const WorkspaceSize& size) {
  return needed.num_counters <= size.num_counters &&
         needed.num_partial_floats <= size.num_partial_floats;
}

// One that is idle, or a new one.
Allocation take(Allocations& idle, const WorkspaceSize& needed, bool is_captured) {
  const auto found = std::find_if(idle.begin(), idle.end(), [&](const Allocation& allocation) {
    return fits(needed, allocation.size);
  });
  if (found == idle.end()) return allocate(needed, is_captured);
  const Allocation taken = *found;
  idle.erase(found);
  return taken;
}

// The capture that records the launches on a stream: its number, 0 for none, and its graph.
std::pair<unsigned long long, cudaGraph_t> capture_of(cudaStream_t stream) {
  cudaStreamCaptureStatus status;
  unsigned long long number = 0;
  cudaGraph_t graph = nullptr;
#if CUDART_VERSION >= 13000
  C10_CUDA_CHECK(cudaStreamGetCaptureInfo(stream, &status, &number, &graph));
#else
  C10_CUDA_CHECK(cudaStreamGetCaptureInfo_v2(stream, &status, &number, &graph));
#endif
  if (status != cudaStreamCaptureStatusActive) return {0, nullptr};
  return {number, graph};
}

// Called when the last graph of a capture is destroyed and runs no more.
void CUDART_CB note_end(void* sequence) {
  const std::unique_ptr<Sequence> owned(static_cast<Sequence*>(sequence));
  Workspaces& all = workspaces();
  const std::lock_guard lock(all.ended_mutex);
  all.ended.push_back(*owned);
}

void give_back(Workspaces& all, std::map<Sequence, Owned>::iterator entry) {
  Allocations& idle = all.idle[entry->first.device];
  const Allocations& given = entry->second.allocations;
  idle.insert(idle.end(), given.begin(), given.end());
  all.used.erase(entry);
}

// Makes workspaces idle that belong to captures whose graphs are destroyed.
void collect(Workspaces& all) {
  std::vector<Sequence> ended;
  {
    const std::lock_guard lock(all.ended_mutex);
    ended.swap(all.ended);
  }
  for (const Sequence& sequence : ended) {
    const auto found = all.used.find(sequence);
    if (found == all.used.end()) continue;
    give_back(all, found);
  }
}

// Makes the workspaces of the other streams of a device idle on which nothing is under way. A
// stream that may be gone cannot be asked, nor the default one while another stream is captured.
void collect_from_others(Workspaces& all, const Sequence& own) {
  const c10::cuda::CUDAStreamCaptureModeGuard guard(cudaStreamCaptureModeRelaxed);
  for (auto next = all.used.begin(); next != all.used.end();) {
    const auto entry = next++;
    const auto& [sequence, owned] = *entry;
    if (sequence.device != own.device || sequence.capture != 0 || !owned.lives) continue;
    if (sequence == own || capture_of(sequence.stream).first != 0) continue;
    if (cudaStreamQuery(sequence.stream) == cudaSuccess) {
      give_back(all, entry);
    } else {
      cudaGetLastError();  // not to be ready is no error
    }
  }
}

// Has the graph, and all that are instantiated from it, own the workspaces of a sequence.
void let_own(cudaGraph_t graph, const Sequence& sequence) {
  auto owned = std::make_unique<Sequence>(sequence);
  cudaUserObject_t object;
  C10_CUDA_CHECK(
      cudaUserObjectCreate(&object, owned.get(), note_end, 1, cudaUserObjectNoDestructorSync));
  owned.release();
  C10_CUDA_CHECK(cudaGraphRetainUserObject(graph, object, 1, cudaGraphUserObjectMove));
}

}  // namespace

LeasedWorkspace workspace_of(cudaStream_t stream, bool lives, const DeviceLimits& limits,
                             const WorkspaceSize& needed) {
  const auto [capture, graph] = capture_of(stream);
  const Sequence sequence{c10::cuda::current_device(), stream, capture};
  Workspaces& all = workspaces();
  std::unique_lock lock(all.mutex);
  collect(all);
  if (capture != 0 && !all.used.contains(sequence)) let_own(graph, sequence);
  Owned& owned = all.used.try_emplace(sequence, Owned{{}, lives}).first->second;
  Allocations& allocations = owned.allocations;
  const WorkspaceSize existing = allocations.empty() ? WorkspaceSize{} : allocations.back().size;
  if (!fits(needed, existing)) {
    WorkspaceSize size = larger(existing, needed);
    if (capture == 0) {
      size = larger(size, largest_workspace(limits));
      collect_from_others(all, sequence);
    }
    allocations.push_back(take(all.idle[sequence.device], size, capture != 0));
  }
  return {allocations.back().workspace, std::move(lock)};
}

void reset_workspaces() {
  Workspaces& all = workspaces();
  const std::lock_guard lock(all.mutex);
  const auto reset = [](c10::DeviceIndex device, const Allocations& allocations) {
    const c10::cuda::CUDAGuard guard(device);
    C10_CUDA_CHECK(cudaDeviceSynchronize());
    for (const Allocation& allocation : allocations) zero_counters(allocation);
  };
  for (const auto& [sequence, owned] : all.used) reset(sequence.device, owned.allocations);
  for (const auto& [device, allocations] : all.idle) reset(device, allocations);
}

}  // namespace tree_attention::cuda
