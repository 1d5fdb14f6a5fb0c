// SPDX-License-Identifier: BSD-3-Clause
//
// The emulated device: it runs a kernel's blocks and threads as fibers on the calling OS thread, in
// an order that a seed decides. Threads change places at barriers, at functions of a warp, around
// atomics, at fences, at acquire loads and at waits for copies; between two of these a thread runs
// without interruption. An error of the kernel is an Error out of launch().
#pragma once

#include <cstdint>
#include <functional>
#include <source_location>
#include <stdexcept>
#include <string>
#include <vector>

namespace tree_attention::emulator {

struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// What a copy of 16 bytes asks of global memory.
struct Request {
  const void* source;
  int num_bytes;       // that are read
  unsigned block = 0;  // of the grid, and the thread in it; note_request() knows them
  unsigned thread = 0;
};

struct Options {
  uint64_t seed = 0;
  int resident_blocks = 2;                   // a block of a larger grid begins when another ends
  std::vector<Request>* requests = nullptr;  // where those of all launches are noted, if anywhere
  size_t shared_bytes_per_sm = 228 * 1024;
};
Options& options();

// Sums over all launches since they were last set to zero.
struct Counters {
  int64_t launches = 0;
  int64_t blocks = 0;
  int64_t switches = 0;        // of fibers
  int64_t async_copies = 0;    // cp.async instructions of a thread
  int64_t matrix_loads = 0;    // ldmatrix instructions of a warp
  int64_t bank_conflicts = 0;  // of ldmatrix: accesses to shared memory beyond one per matrix
};
Counters& counters();

// It is over when this returns, unless there are Streams.
void launch(unsigned num_blocks, unsigned num_threads, size_t shared_bytes, const void* stream,
            std::function<void()> kernel, unsigned cluster_size = 1);

// How many blocks shared memory and threads leave room for on a multiprocessor, as a driver says
// it. The emulated device knows no registers.
int most_resident_blocks(int num_threads, size_t shared_bytes);

// Launches while it exists wait for run(), which runs those of a stream one after the other, and
// streams side by side: ranks of one device. Each grid has its own resident blocks.
class Streams {
 public:
  Streams();
  ~Streams();
  Streams(const Streams&) = delete;

  void run();
};

// The rest is for the built-ins and the PTX functions, which run on a thread of a kernel.

constexpr int kWarpSize = 32;

[[noreturn]] void fail(const std::string& message, const std::source_location& where);

// Waits until every lane of the warp has come here. The last to arrive computes for all: `compute`
// gets the operands of each lane.
using Compute = void (*)(void* const (&operands)[kWarpSize]);
void warp_function(const char* name, void* operands, Compute compute,
                   const std::source_location& where);
void warp_barrier(const std::source_location& where);
void block_barrier(const std::source_location& where);
void cluster_barrier(const std::source_location& where);

// A place where another thread may run. Only acquire loads, for very long, are a livelock.
enum class At { kAtomic, kFence, kAcquireLoad, kAsyncWait };
void switch_point(At at, const std::source_location& where);

// Nanoseconds. Whoever reads the clock moves it on by one microsecond.
uint64_t clock();

char* shared_memory();
uint32_t shared_address(const void* pointer, const std::source_location& where);
// Fails where a pointer to global memory is one into the block's shared memory, which a device
// cannot reach by the same instructions.
void require_global(const void* pointer, const std::source_location& where);
// The same address in block `rank` of the cluster.
uint32_t map_to_block(uint32_t address, uint32_t rank, const std::source_location& where);
// The bytes at a shared address, which must be aligned to their number and inside of the memory of
// this block, or of the block of its cluster that map_to_block() gave it.
char* shared_bytes(uint32_t address, int num_bytes, const std::source_location& where);

void note_request(Request request);
void begin_async_copy(uint32_t destination, const void* source, int size, int num_bytes,
                      const std::source_location& where);
void commit_async_copies();
void wait_for_async_copies(int pending, const std::source_location& where);

}  // namespace tree_attention::emulator
