// SPDX-License-Identifier: BSD-3-Clause
#include "machine.h"

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "block.h"
#include "emulator.h"
#include "run.h"
#include "sanitizers.h"

emulator_index threadIdx, blockIdx, blockDim, gridDim;

namespace tree_attention::emulator {
namespace {

constexpr uint32_t kSharedBase = 1024;  // a shared address is never zero
constexpr int kRankBit = 24;            // of a mapped address: one more than the block's rank

// Launches that wait for Streams::run.
struct Waiting {
  Grids grids;
  std::vector<const void*> streams;  // of each
};
std::unique_ptr<Waiting> waiting;

void run(const Grids& grids) {
  Run run(grids);
  struct Running {
    explicit Running(Run* run) { Run::running = run; }
    ~Running() { Run::running = nullptr; }
  } const running(&run);
  run.run();
}

}  // namespace

Options& options() {
  static Options options;
  return options;
}

Counters& counters() {
  static Counters counters;
  return counters;
}

void launch(unsigned num_blocks, unsigned num_threads, size_t shared_bytes, const void* stream,
            std::function<void()> kernel, unsigned cluster_size) {
  if (Run::running != nullptr) throw Error("a launch within a launch");
  if (num_threads == 0 || num_threads % kWarpSize != 0) {
    throw Error("blocks are whole warps here, not " + std::to_string(num_threads) + " threads");
  }
  if (cluster_size < 1 || cluster_size > 8 || num_blocks % cluster_size != 0) {
    throw Error("clusters of " + std::to_string(cluster_size) + " blocks, of " +
                std::to_string(num_blocks));
  }
  if (options().resident_blocks < 1) throw Error("no resident blocks");
  const Hidden hidden;
  ++counters().launches;
  auto grid = std::make_unique<Grid>();
  grid->num_blocks = num_blocks;
  grid->num_threads = num_threads;
  grid->cluster_size = cluster_size;
  grid->shared_bytes = shared_bytes;
  grid->kernel = std::move(kernel);
  if (waiting == nullptr) {
    Grids grids;
    grids.push_back(std::move(grid));
    run(grids);
    return;
  }
  for (size_t i = 0; i < waiting->grids.size(); ++i) {
    if (waiting->streams[i] == stream) grid->before = waiting->grids[i].get();
  }
  waiting->grids.push_back(std::move(grid));
  waiting->streams.push_back(stream);
}

Streams::Streams() {
  if (waiting != nullptr) throw Error("streams within streams");
  waiting = std::make_unique<Waiting>();
}

Streams::~Streams() { waiting.reset(); }

void Streams::run() {
  const Hidden hidden;
  Waiting launches = std::exchange(*waiting, {});
  emulator::run(launches.grids);
}

void fail(const std::string& message, const std::source_location& where) {
  const Thread* thread = Run::current;
  std::string place;
  if (thread != nullptr) {
    place = " (block " + std::to_string(thread->warp->block->index) + ", thread " +
            std::to_string(thread->index) + ")";
  }
  throw Error(at(where) + ": " + message + place);
}

void warp_function(const char* name, void* operands, Compute compute,
                   const std::source_location& where) {
  const Hidden hidden;
  Run::running->meet_in_warp(name, operands, compute, where);
}

void warp_barrier(const std::source_location& where) {
  const Hidden hidden;
  Run::running->warp_barrier(where);
}

void block_barrier(const std::source_location& where) {
  const Hidden hidden;
  Run::running->block_barrier(where);
}

void cluster_barrier(const std::source_location& where) {
  const Hidden hidden;
  Run::running->cluster_barrier(where);
}

void switch_point(At at, const std::source_location& where) {
  const Hidden hidden;
  Run::running->switch_point(at, where);
}

uint64_t clock() {
  static uint64_t nanoseconds = 0;
  const Hidden hidden;
  return nanoseconds += 1000;
}

char* shared_memory() { return Run::current->warp->block->shared.get(); }

uint32_t shared_address(const void* pointer, const std::source_location& where) {
  const Block& block = *Run::current->warp->block;
  const int64_t offset = static_cast<const char*>(pointer) - block.shared.get();
  if (offset < 0 || offset > static_cast<int64_t>(block.shared_bytes)) {
    fail("not an address in the block's shared memory", where);
  }
  return static_cast<uint32_t>(kSharedBase + offset);
}

void require_global(const void* pointer, const std::source_location& where) {
  const Block& block = *Run::current->warp->block;
  const int64_t offset = static_cast<const char*>(pointer) - block.shared.get();
  if (0 <= offset && offset < static_cast<int64_t>(block.shared_bytes)) {
    fail("an access to global memory with an address in shared memory", where);
  }
}

uint32_t map_to_block(uint32_t address, uint32_t rank, const std::source_location& where) {
  if (rank >= Run::current->warp->block->cluster->blocks.size()) {
    fail("the cluster has no block " + std::to_string(rank), where);
  }
  return (rank + 1) << kRankBit | address;
}

char* shared_bytes(uint32_t address, int num_bytes, const std::source_location& where) {
  const Block* const own = Run::current->warp->block;
  const uint32_t mapped = address >> kRankBit;
  const Block* const owner = mapped == 0 ? own : own->cluster->blocks[mapped - 1];
  if (owner == nullptr) fail("the block whose memory this is has ended", where);
  return block_bytes(*owner, address & ((1u << kRankBit) - 1), num_bytes, where);
}

char* block_bytes(const Block& block, uint32_t address, int num_bytes,
                  const std::source_location& where) {
  const int64_t offset = int64_t{address} - kSharedBase;
  if (offset % num_bytes != 0) {
    fail("shared address " + std::to_string(offset) + " is no multiple of " +
             std::to_string(num_bytes),
         where);
  }
  if (offset < 0 || offset + num_bytes > static_cast<int64_t>(block.shared_bytes)) {
    fail("shared address " + std::to_string(offset) + " is outside of the " +
             std::to_string(block.shared_bytes) + " bytes",
         where);
  }
  return block.shared.get() + offset;
}

int most_resident_blocks(int num_threads, size_t shared_bytes) {
  // CUDA C++ Programming Guide, "Technical Specifications per Compute Capability", 8.0 and 9.0.
  constexpr int kThreads = 2048;
  constexpr size_t kSystemBytes = 1024;  // of each block
  const size_t by_memory = options().shared_bytes_per_sm / (shared_bytes + kSystemBytes);
  return static_cast<int>(std::min<size_t>(kThreads / num_threads, by_memory));
}

void note_request(Request request) {
  const Hidden hidden;
  if (options().requests == nullptr) return;
  request.block = blockIdx.x;
  request.thread = threadIdx.x;
  options().requests->push_back(request);
}

void begin_async_copy(uint32_t destination, const void* source, int size, int num_bytes,
                      const std::source_location& where) {
  char* const bytes = shared_bytes(destination, size, where);
  if (num_bytes != 0 && num_bytes != size) {
    fail("a copy of " + std::to_string(num_bytes) + " bytes of " + std::to_string(size), where);
  }
  if (reinterpret_cast<uintptr_t>(source) % size != 0) {
    fail("the source of a copy is no multiple of " + std::to_string(size), where);
  }
  bool read_now;
  {
    const Hidden hidden;
    ++counters().async_copies;
    Run::current->where = where;
    read_now = Run::running->coin();
  }
  Run::current->copies.begin(bytes, source, size, num_bytes, read_now);
}

void commit_async_copies() { Run::current->copies.commit(); }

void wait_for_async_copies(int pending, const std::source_location& where) {
  switch_point(At::kAsyncWait, where);
  Run::current->copies.wait(pending);
}

}  // namespace tree_attention::emulator
