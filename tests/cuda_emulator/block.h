// SPDX-License-Identifier: BSD-3-Clause
//
// A resident block: its threads, where they wait, and its shared memory.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <source_location>
#include <vector>

#include "async_copies.h"
#include "async_proxy.h"
#include "fiber.h"
#include "machine.h"
#include "products.h"
#include "sanitizers.h"

namespace tree_attention::emulator {

inline constexpr uint32_t kAllLanes = 0xffffffff;
inline constexpr size_t kSharedAlignment = 1024;
inline constexpr size_t kRedzone = 4096;        // bytes after shared memory
inline constexpr unsigned char kPoison = 0xff;  // NaN in every format

struct Warp;

struct Thread {
  Thread(Warp* warp, int lane, unsigned index, void (*entry)(void*))
      : warp(warp), lane(lane), index(index), fiber(entry, this) {}

  Warp* warp;
  int lane;
  unsigned index;  // in the block
  AsyncCopies copies;
  const char* waits_for = nullptr;  // null: it does not wait
  std::source_location where;
  bool at_barrier = false;             // an mbarrier, whose phase threads of other warps may end
  std::map<uint32_t, int64_t> phases;  // by barrier: the last one that this thread has seen end
  bool ended = false;
  Fiber fiber;
};

struct Block;

// Where threads meet. What is released at one meeting may not reach a thread that leaves the
// meeting before, hence two objects in turn.
struct Meeting {
  const char* name = nullptr;
  std::source_location where;  // source line of the first thread to arrive
  unsigned arrived = 0;
  unsigned generation = 0;
  char order[2];

  void* object() { return &order[generation % 2]; }
};

// A barrier of some threads of a block.
struct NamedBarrier {
  struct Arrival {
    Thread* thread;
    bool* any;  // where a waiting thread finds the result
  };
  std::vector<Arrival> arrived;
  uint32_t count = 0;
  bool votes = false, any = false;
  unsigned generation = 0;
  char order[2];

  void* object() { return &order[generation % 2]; }
};

struct Warp {
  Block* block;
  std::vector<std::unique_ptr<Thread>> lanes;
  uint32_t runnable = kAllLanes;
  size_t position = 0;  // among the runnable warps, if any lane is runnable
  Meeting meeting;
  void* operands[kWarpSize];
  Products products;
};

// Blocks that are resident together, and where they meet.
struct Cluster {
  std::vector<Block*> blocks;  // by their rank; null: it has ended
  Meeting barrier;
};

// A launch.
struct Grid {
  unsigned num_blocks, num_threads;
  unsigned cluster_size;  // blocks per cluster; divides the number of blocks
  size_t shared_bytes;
  std::function<void()> kernel;
  Grid* before = nullptr;       // on the same stream, which must have ended
  std::vector<unsigned> order;  // in which clusters begin
  size_t begun = 0, ended = 0;  // blocks that have begun, and that have ended
  char end;                     // what threads release at their end

  bool has_ended() const {
    return ended == num_blocks && (before == nullptr || before->has_ended());
  }
};

struct Block {
  Block(Grid* grid, unsigned index, Cluster* of_cluster)
      : grid(grid), index(index), cluster(of_cluster), shared_bytes(grid->shared_bytes) {
    cluster->blocks.push_back(this);
    const size_t size = (shared_bytes + kRedzone + kSharedAlignment - 1) & ~(kSharedAlignment - 1);
    shared.reset(static_cast<char*>(std::aligned_alloc(kSharedAlignment, size)));
    std::memset(shared.get(), kPoison, size);
    forbid_access(shared.get() + shared_bytes, kRedzone);
  }
  ~Block() {
    cluster->blocks[rank()] = nullptr;
    allow_access(shared.get() + shared_bytes, kRedzone);
  }

  bool redzone_is_whole() {
    const char* end = shared.get() + shared_bytes;
    allow_access(shared.get() + shared_bytes, kRedzone);
    return std::all_of(end, end + kRedzone, [](unsigned char x) { return x == kPoison; });
  }

  AsyncProxy& async() {
    if (async_proxy == nullptr) {
      async_proxy = std::make_unique<AsyncProxy>();
      async_proxy->memory.resize(shared_bytes, static_cast<char>(kPoison));
    }
    return *async_proxy;
  }

  unsigned rank() const { return index % grid->cluster_size; }  // in its cluster

  Grid* grid;
  unsigned index;
  Cluster* cluster;
  size_t shared_bytes;
  struct Free {
    void operator()(char* memory) const { std::free(memory); }
  };
  std::unique_ptr<char, Free> shared;
  std::vector<std::unique_ptr<Warp>> warps;
  unsigned runnable_warps = 0;
  unsigned ended_threads = 0;
  Meeting barrier;
  NamedBarrier named_barriers[16];
  std::unique_ptr<AsyncProxy> async_proxy;    // null: not used
  std::map<size_t, ProductLog> product_logs;  // of warpgroups
};

// The bytes at an address of its memory, as shared_bytes() of machine.h.
char* block_bytes(const Block& block, uint32_t address, int num_bytes,
                  const std::source_location& where);

}  // namespace tree_attention::emulator
