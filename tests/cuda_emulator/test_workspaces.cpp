// SPDX-License-Identifier: BSD-3-Clause
//
// Which launches share scratch memory, on a runtime whose captures this file begins and ends.
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <set>
#include <vector>

#include "c10/cuda/CUDACachingAllocator.h"
#include "check.h"
#include "cuda/decode/workspaces.h"

struct CUuserObject_st {
  void* data;
  cudaHostFn_t destroy;
};

struct CUgraph_st {
  unsigned long long number;
  std::vector<cudaUserObject_t> objects;

  ~CUgraph_st() {
    for (cudaUserObject_t object : objects) {
      object->destroy(object->data);
      delete object;
    }
  }
};

namespace {

std::map<cudaStream_t, cudaGraph_t> captures;
std::set<cudaStream_t> busy, asked;  // asked: whether they are busy
int num_allocations = 0, num_emptied = 0;
bool holds_all_memory = false;  // torch, until its cache is emptied
bool is_in_use = false;         // all of it, so that nothing is given back

}  // namespace

void c10::cuda::CUDACachingAllocator::emptyCache() {
  ++num_emptied;
  holds_all_memory = is_in_use;
}
cudaError_t cudaMalloc(void** memory, size_t bytes) {
  if (holds_all_memory) return cudaErrorMemoryAllocation;
  *memory = std::malloc(bytes);  // as on the device, never freed
  std::memset(*memory, 0xff, bytes);
  ++num_allocations;
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t) {
  std::memset(memory, value, bytes);
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  *stream = nullptr;
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamQuery(cudaStream_t stream) {
  asked.insert(stream);
  return busy.contains(stream) ? cudaErrorNotReady : cudaSuccess;
}
cudaError_t cudaGetLastError() { return cudaSuccess; }
cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                     unsigned long long* number, cudaGraph_t* graph) {
  const auto found = captures.find(stream);
  *status = cudaStreamCaptureStatusNone;
  if (found == captures.end()) return cudaSuccess;
  *status = cudaStreamCaptureStatusActive;
  *number = found->second->number;
  *graph = found->second;
  return cudaSuccess;
}
cudaError_t cudaUserObjectCreate(cudaUserObject_t* object, void* data, cudaHostFn_t destroy,
                                 unsigned, unsigned) {
  *object = new CUuserObject_st{data, destroy};
  return cudaSuccess;
}
cudaError_t cudaGraphRetainUserObject(cudaGraph_t graph, cudaUserObject_t object, unsigned,
                                      unsigned) {
  graph->objects.push_back(object);
  return cudaSuccess;
}

void test_workspaces() {
  using namespace tree_attention::cuda;
  const DeviceLimits limits{16, 228 << 10, 227 << 10};
  const WorkspaceSize small{8, 1000}, large{20, 5000}, huge{100'000, 1000};
  cudaStream_t a, b;
  std::memset(&a, 1, sizeof(a));
  std::memset(&b, 2, sizeof(b));

  const auto get = [&](cudaStream_t stream, const WorkspaceSize& size, bool lives = false) {
    const Workspace workspace = workspace_of(stream, lives, limits, size).workspace;
    for (int64_t i = 0; i < size.num_counters; ++i) {
      CHECK(workspace.counters[i] == 0, "counter ", i);
    }
    return workspace.counters;
  };
  unsigned long long last_number = 0;
  const auto captured = [&](cudaStream_t stream, const auto& launches) {
    auto graph = std::make_unique<CUgraph_st>(++last_number, std::vector<cudaUserObject_t>{});
    captures[stream] = graph.get();
    launches();
    captures.erase(stream);
    return graph;
  };

  // A stream has one, for launches of every size but those of too many workers.
  const uint32_t* of_a = get(a, small);
  CHECK(get(a, large) == of_a && num_allocations == 1, num_allocations);
  CHECK(get(b, small) != of_a && num_allocations == 2, num_allocations);
  const uint32_t* of_many = get(a, huge);
  CHECK(of_many != of_a && get(a, small) == of_many && num_allocations == 3, num_allocations);

  // Two graphs of a stream have two, each for all of its launches.
  const uint32_t *of_first, *of_second;
  auto first = captured(a, [&] {
    of_first = get(a, small);
    CHECK(get(a, small) == of_first, "another one for the second launch");
  });
  auto second = captured(a, [&] { of_second = get(a, large); });
  const std::set<const uint32_t*> all{of_a, of_many, of_first, of_second};
  CHECK(all.size() == 4 && num_allocations == 5, num_allocations);
  CHECK(get(a, small) == of_many, "a capture has changed the stream's");

  // So do two branches of one capture.
  const uint32_t* of_branch;
  auto forked = captured(a, [&] {
    captures[b] = captures[a];
    of_branch = get(a, small);
    CHECK(get(b, small) != of_branch, "the same one for both branches");
    captures.erase(b);
  });
  CHECK(num_allocations == 7, num_allocations);

  // A destroyed graph's goes to a capture for which it is large enough.
  second.reset();
  auto third = captured(b, [&] { CHECK(get(b, small) == of_second, "an idle one is not used"); });
  auto fourth = captured(b, [&] { CHECK(get(b, small) != of_second, "one for two graphs"); });
  CHECK(num_allocations == 8, num_allocations);
  first.reset();
  const auto grown = captured(a, [&] {
    CHECK(get(a, small) == of_first, "an idle one is not used");
    CHECK(get(a, large) != of_first, "too small");
  });
  CHECK(num_allocations == 9, num_allocations);

  // An aborted launch leaves counters at any value, in graphs too.
  for (const uint32_t* counters : {of_a, of_first, of_branch}) {
    const_cast<uint32_t*>(counters)[3] = 7;
  }
  reset_workspaces();
  CHECK(of_a[3] == 0 && of_first[3] == 0 && of_branch[3] == 0, "not reset");

  // Streams have as many as are busy at a time, unless they may be gone or are captured.
  std::vector<cudaStream_t> streams(8);
  for (size_t i = 0; i < streams.size(); ++i) std::memset(&streams[i], 3 + i, sizeof(a));
  num_allocations = 0;
  std::set<const uint32_t*> of_streams;
  for (cudaStream_t stream : streams) {
    of_streams.insert(get(stream, large, true));
    CHECK(of_streams.contains(get(stream, small, true)), "another one for the second launch");
  }
  CHECK(of_streams.size() == 1 && num_allocations == 1, num_allocations);
  CHECK(!asked.contains(a) && !asked.contains(b), "a stream that may be gone is asked");
  busy.insert(streams.begin(), streams.end());
  for (cudaStream_t stream : streams) of_streams.insert(get(stream, small, true));
  CHECK(of_streams.size() == 8 && num_allocations == 8, num_allocations);
  busy.clear(), asked.clear();
  cudaStream_t c;
  std::memset(&c, 50, sizeof(c));
  const auto last = captured(streams[0], [&] {
    CHECK(!of_streams.contains(get(c, huge)), "too small");
    CHECK(!asked.contains(streams[0]) && asked.contains(streams[1]), "which are asked");
  });
  const uint32_t* of_other = get(b, huge);
  CHECK(of_other != get(a, huge), "that of a stream that may be gone");

  // torch gives back what it does not use, but not during a capture.
  holds_all_memory = true;
  get(streams[0], {1 << 20, 1000}, true);
  CHECK(num_emptied == 1, num_emptied);
  holds_all_memory = true;
  const auto fails = [&](cudaStream_t stream) {
    try {
      get(stream, {1 << 21, 1000}, true);
    } catch (const std::runtime_error&) {
      return true;
    }
    return false;
  };
  const auto failed = captured(streams[1], [&] {
    CHECK(fails(streams[1]) && num_emptied == 1, "emptied during a capture");
  });
  is_in_use = true;
  CHECK(fails(streams[2]) && num_emptied == 2, num_emptied, " calls for memory in use");
  holds_all_memory = is_in_use = false;
  get(streams[2], {1 << 21, 1000}, true);  // what has failed may be tried again
}
