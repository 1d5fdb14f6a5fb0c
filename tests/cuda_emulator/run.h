// SPDX-License-Identifier: BSD-3-Clause
//
// The emulated device while it runs some launches: which thread runs next, where threads wait for
// one another, and what is an error of the kernel there.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <exception>
#include <memory>
#include <numeric>
#include <source_location>
#include <string>
#include <utility>
#include <vector>

#include "block.h"
#include "emulator.h"
#include "fiber.h"
#include "machine.h"
#include "random.h"
#include "sanitizers.h"

namespace tree_attention::emulator {

inline constexpr int64_t kLivelock = 1 << 18;  // acquire loads one after the other

inline std::string at(const std::source_location& where) {
  const std::string file = where.file_name();
  return file.substr(file.rfind('/') + 1) + ":" + std::to_string(where.line());
}

inline bool same_text(const char* a, const char* b) { return a == b || std::strcmp(a, b) == 0; }

inline bool same_line(const std::source_location& a, const std::source_location& b) {
  return a.line() == b.line() && same_text(a.file_name(), b.file_name());
}

// Grids in the order of their launches; those of a stream may lie between others'.
using Grids = std::vector<std::unique_ptr<Grid>>;

// The device while it runs some launches.
class Run {
 public:
  explicit Run(const Grids& grids)
      : grids_(grids), random_(options().seed), time_(~options().seed) {
    for (const auto& grid : grids) {
      auto& order = grid->order;
      order.resize(grid->num_blocks / grid->cluster_size);
      std::iota(order.begin(), order.end(), 0u);
      for (unsigned i = static_cast<unsigned>(order.size()); i > 1; --i) {
        std::swap(order[i - 1], order[random_.below(i)]);
      }
    }
    // From warps that change at every opportunity to warps that run until they must wait.
    switch_period_ = 1u << 2 * random_.below(9);
    period_of_time_ = 1u << time_.below(9);
  }

  void run() {
    for (begin_blocks(); !blocks_.empty(); begin_blocks()) {
      while (runnable_.empty() && !copies_.empty()) end_copy(copies_.begin());
      if (runnable_.empty()) throw Error("deadlock: " + describe(*blocks_.front()));
      switch_to(next_thread(), os_thread_);
      if (error_) break;
      end_block();
    }
    for (const auto& grid : grids_) acquire(&grid->end);
    if (error_) std::rethrow_exception(error_);
  }

  // In a thread of the kernel:

  void meet_in_warp(const char* name, void* operands, Compute compute,
                    const std::source_location& where) {
    Warp& warp = *current->warp;
    Meeting& meeting = warp.meeting;
    warp.operands[current->lane] = operands;
    if (arrive(meeting, name, where) == kWarpSize) {
      if (compute != nullptr) compute(warp.operands);
      close(meeting);
      wake(warp);
      change_thread();
    } else {
      wait();
    }
    current->waits_for = nullptr;
  }

  // The same; what was before in one lane happens before what follows in another.
  void warp_barrier(const std::source_location& where) {
    void* object = current->warp->meeting.object();
    release(object);
    meet_in_warp("__syncwarp", nullptr, nullptr, where);
    acquire(object);
  }

  void block_barrier(const std::source_location& where) {
    Block& block = *current->warp->block;
    void* object = block.barrier.object();
    release(object);
    if (arrive(block.barrier, "__syncthreads", where) == block.grid->num_threads) {
      close(block.barrier);
      for (auto& warp : block.warps) wake(*warp);
      change_thread();
    } else {
      wait();
    }
    current->waits_for = nullptr;
    acquire(object);
  }

  void cluster_barrier(const std::source_location& where) {
    Block& block = *current->warp->block;
    Cluster* const cluster = block.cluster;
    void* object = cluster->barrier.object();
    release(object);
    const unsigned all = block.grid->num_threads * block.grid->cluster_size;
    if (arrive(cluster->barrier, "barrier.cluster", where) == all) {
      close(cluster->barrier);
      for (Block* member : cluster->blocks) {
        for (auto& warp : member->warps) wake(*warp);
      }
      change_thread();
    } else {
      wait();
    }
    current->waits_for = nullptr;
    acquire(object);
  }

  // Until something wakes this thread.
  void wait_for(const char* name, const std::source_location& where) {
    acquire_loads_ = 0;
    current->waits_for = name;
    current->where = where;
    wait();
    current->waits_for = nullptr;
  }

  // At a place where others may come first.
  void change_thread_at(const std::source_location& where) {
    acquire_loads_ = 0;
    current->where = where;
    change_thread();
  }

  void wake(Thread& thread) {
    Warp& warp = *thread.warp;
    if (warp.runnable == 0) add_runnable(warp);
    warp.runnable |= 1u << thread.lane;
  }

  void begin(BulkCopy copy) { copies_.push_back(std::move(copy)); }
  void begin_product(Warp& warp) { multiplying_.push_back(&warp); }
  void end_product(Warp& warp) {
    multiplying_.erase(std::find(multiplying_.begin(), multiplying_.end(), &warp));
  }

  void switch_point(At at_what, const std::source_location& where) {
    if (at_what == At::kAtomic) acquire_loads_ = 0;
    if (at_what == At::kAcquireLoad && ++acquire_loads_ > kLivelock) {
      current->where = where;
      fail("livelock: nothing but acquire loads", where);
    }
    // Who waits gives way to other warps, however seldom they change.
    change_thread(at_what == At::kAcquireLoad);
  }

  bool coin() { return random_.below(2) == 0; }
  bool once_in(uint32_t times) { return random_.below(times) == 0; }

  static inline Run* running = nullptr;
  static inline Thread* current = nullptr;

 private:
  void begin_blocks() {
    const size_t max_resident = options().resident_blocks;
    for (const auto& grid : grids_) {
      if (grid->before != nullptr && !grid->before->has_ended()) continue;
      const size_t size = grid->cluster_size;
      while (grid->begun < grid->num_blocks &&
             grid->begun - grid->ended + size <= std::max(max_resident, size)) {
        begin_cluster(*grid, grid->order[grid->begun / size]);
      }
    }
  }

  void begin_cluster(Grid& grid, unsigned index) {
    clusters_.push_back(std::make_unique<Cluster>());
    for (unsigned rank = 0; rank < grid.cluster_size; ++rank) {
      begin_block(grid, index * grid.cluster_size + rank, clusters_.back().get());
    }
  }

  void begin_block(Grid& grid, unsigned index, Cluster* cluster) {
    ++counters().blocks;
    ++grid.begun;
    blocks_.push_back(std::make_unique<Block>(&grid, index, cluster));
    Block& block = *blocks_.back();
    for (unsigned first = 0; first < grid.num_threads; first += kWarpSize) {
      block.warps.push_back(std::make_unique<Warp>());
      Warp& warp = *block.warps.back();
      warp.block = &block;
      for (int lane = 0; lane < kWarpSize; ++lane) {
        warp.lanes.push_back(std::make_unique<Thread>(&warp, lane, first + lane, run_thread));
      }
      add_runnable(warp);
    }
  }

  void end_block() {
    const auto ended = std::find_if(blocks_.begin(), blocks_.end(), [](const auto& block) {
      return block->ended_threads == block->grid->num_threads;
    });
    if (!(*ended)->redzone_is_whole()) {
      throw Error("block " + std::to_string((*ended)->index) + " wrote beyond its " +
                  std::to_string((*ended)->shared_bytes) + " bytes of shared memory");
    }
    for (const BulkCopy& copy : copies_) {
      if (copy.block == ended->get()) {
        throw Error(at(copy.where) + ": block " + std::to_string((*ended)->index) +
                    " ended before this copy");
      }
    }
    if ((*ended)->async_proxy != nullptr) {
      for (const auto& [offset, barrier] : (*ended)->async_proxy->barriers) {
        if (barrier.bytes != 0) {
          throw Error("block " + std::to_string((*ended)->index) + " ended while its barrier at " +
                      std::to_string(offset) + " waits for " + std::to_string(barrier.bytes) +
                      " bytes");
        }
      }
    }
    ++(*ended)->grid->ended;
    blocks_.erase(ended);
  }

  static void run_thread(void* argument) {
    Thread& thread = *static_cast<Thread*>(argument);
    Run& run = *running;
    Grid& grid = *thread.warp->block->grid;
    if (grid.before != nullptr) acquire(&grid.before->end);
    try {
      grid.kernel();
      run.end_thread(thread);
    } catch (...) {
      run.error_ = std::current_exception();
      release(&grid.end);
    }
    const Hidden hidden;
    Fiber::resume(run.os_thread_, thread.fiber);
  }

  // Returns in the last thread of a block.
  void end_thread(Thread& thread) {
    if (!thread.copies.empty()) {
      fail("a thread ends with copies that it has not waited for", thread.where);
    }
    Block& block = *thread.warp->block;
    release(&block.grid->end);
    const Hidden hidden;
    if (!thread.warp->products.issued.empty()) {
      fail("a warp ends with products that it has not waited for",
           thread.warp->products.issued.front().where);
    }
    thread.ended = true;
    thread.waits_for = "the end";
    if (++block.ended_threads < block.grid->num_threads) {
      wait();
    } else {
      require_equal_products(block);
      leave();
    }
  }

  unsigned arrive(Meeting& meeting, const char* name, const std::source_location& where) {
    acquire_loads_ = 0;
    if (meeting.arrived == 0) {
      meeting.name = name;
      meeting.where = where;
    } else if (!same_text(meeting.name, name) || !same_line(meeting.where, where)) {
      fail("divergence: others wait for " + std::string(meeting.name) + " at " + at(meeting.where) +
               ", this thread for " + name,
           where);
    }
    current->waits_for = name;
    current->where = where;
    return ++meeting.arrived;
  }

  void close(Meeting& meeting) {
    meeting.arrived = 0;
    ++meeting.generation;
  }

  void add_runnable(Warp& warp) {
    warp.position = runnable_.size();
    runnable_.push_back(&warp);
    ++warp.block->runnable_warps;
  }

  // Every lane, all of which wait or run.
  void wake(Warp& warp) {
    if (warp.runnable == 0) add_runnable(warp);
    warp.runnable = kAllLanes;
  }

  void wait() {
    Warp& warp = *current->warp;
    leave();
    let_time_pass();
    if (warp.runnable == 0) {
      // Nothing but its own lanes can complete a function of the warp.
      const bool others_can = std::any_of(warp.lanes.begin(), warp.lanes.end(),
                                          [](const auto& thread) { return thread->at_barrier; });
      if (warp.meeting.arrived != 0 && !others_can) {
        fail("divergence: " + describe(*warp.block), warp.meeting.where);
      }
      const Cluster* const cluster = warp.block->cluster;
      while (!can_run(*cluster)) {
        const auto copy = std::find_if(
            copies_.begin(), copies_.end(),
            [cluster](const BulkCopy& copy) { return copy.block->cluster == cluster; });
        if (copy == copies_.end()) fail("deadlock: " + describe(*warp.block), current->where);
        end_copy(copy);
      }
    }
    Thread& next = next_thread();
    if (&next != current) switch_to(next, current->fiber);
  }

  // Copies arrive and products are computed, one at a time, whatever threads do.
  void let_time_pass() {
    if (copies_.empty() && multiplying_.empty()) return;
    if (time_.below(period_of_time_) != 0) return;
    const auto some = [this](const auto& of) {
      return of.begin() + time_.below(static_cast<uint32_t>(of.size()));
    };
    if (!multiplying_.empty()) {
      const auto warp = some(multiplying_);
      do_product(**warp);
      multiplying_.erase(warp);
    }
    if (!copies_.empty()) end_copy(copies_.begin() + (some(copies_) - copies_.cbegin()));
  }

  void end_copy(std::vector<BulkCopy>::iterator place) {
    BulkCopy copy = std::move(*place);
    copies_.erase(place);
    arrive_in_shared_memory(copy);
  }

  static bool can_run(const Cluster& cluster) {
    return std::any_of(cluster.blocks.begin(), cluster.blocks.end(), [](const Block* block) {
      return block != nullptr && block->runnable_warps > 0;
    });
  }

  // The running thread is not runnable any more.
  void leave() {
    Warp& warp = *current->warp;
    warp.runnable &= ~(1u << current->lane);
    if (warp.runnable != 0) return;
    runnable_.back()->position = warp.position;
    runnable_[warp.position] = runnable_.back();
    runnable_.pop_back();
    --warp.block->runnable_warps;
  }

  void change_thread(bool gives_way = false) {
    let_time_pass();
    Thread& next = next_thread(gives_way);
    if (&next != current) switch_to(next, current->fiber);
  }

  Thread& next_thread(bool gives_way = false) {
    Warp* warp = current == nullptr ? nullptr : current->warp;
    const uint32_t period = gives_way ? std::min(switch_period_, 2u) : switch_period_;
    if (warp == nullptr || warp->runnable == 0 || random_.below(period) == 0) {
      warp = runnable_[random_.below(static_cast<uint32_t>(runnable_.size()))];
    }
    const int first = static_cast<int>(random_.below(kWarpSize));
    const int lane = (first + std::countr_zero(std::rotr(warp->runnable, first))) % kWarpSize;
    return *warp->lanes[lane];
  }

  void switch_to(Thread& next, Fiber& from) {
    ++counters().switches;
    Thread* const before = current;
    set_current(&next);
    Fiber::resume(next.fiber, from);
    set_current(before);
  }

  void set_current(Thread* thread) {
    current = thread;
    if (thread == nullptr) return;
    const Block& block = *thread->warp->block;
    threadIdx.x = thread->index;
    blockIdx.x = block.index;
    blockDim.x = block.grid->num_threads;
    gridDim.x = block.grid->num_blocks;
  }

  // "threads 0-30 wait for __syncthreads at a.cuh:3; threads 31 wait for the end"
  static std::string describe(const Block& block) {
    std::string text, previous;
    unsigned first = 0, last = 0;
    const auto add = [&] {
      if (previous.empty()) return;
      text += (text.empty() ? "threads " : "; threads ") + std::to_string(first);
      if (last != first) text += "-" + std::to_string(last);
      text += previous;
    };
    for (const auto& warp : block.warps) {
      for (const auto& thread : warp->lanes) {
        std::string place = " can run";
        if (thread->waits_for != nullptr) place = std::string(" wait for ") + thread->waits_for;
        if (thread->waits_for != nullptr && !thread->ended) place += " at " + at(thread->where);
        if (place != previous) {
          add();
          first = thread->index;
        }
        previous = place;
        last = thread->index;
      }
    }
    add();
    return text;
  }

  const Grids& grids_;
  Random random_;
  Random time_;  // when copies arrive
  unsigned switch_period_, period_of_time_;
  // They live as long as the run: stacks of threads that an error stops are not unwound, so that no
  // thread may own one.
  std::vector<std::unique_ptr<Cluster>> clusters_;
  std::vector<std::unique_ptr<Block>> blocks_;
  std::vector<Warp*> runnable_;
  std::vector<BulkCopy> copies_;    // under way
  std::vector<Warp*> multiplying_;  // once for each product that has not been computed
  Fiber os_thread_;
  std::exception_ptr error_;
  int64_t acquire_loads_ = 0;  // since something else happened
};

}  // namespace tree_attention::emulator
