// SPDX-License-Identifier: BSD-3-Clause
//
// How threads share the workers of a call. Each thread has an equal run of them, in line order, so
// that a call's keys are found in the caches of the cores that read them in the call before. A
// thread that has done its own takes those that another one has not begun: a core that is slower
// than the others, or that another process uses, delays the call by at most one worker.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

namespace tree_attention::cpu {

class WorkQueue {
 public:
  WorkQueue(int64_t num_workers, int64_t num_threads) : runs_(num_threads) {
    for (int64_t thread = 0; thread < num_threads; ++thread) {
      runs_[thread].next = thread * num_workers / num_threads;
      runs_[thread].end = (thread + 1) * num_workers / num_threads;
    }
  }

  int64_t num_threads() const { return static_cast<int64_t>(runs_.size()); }

  // Calls body(worker) until no worker is left; over all threads, once for each.
  template <typename Body>
  void run(int64_t thread, const Body& body) {
    for (int64_t i = 0; i < num_threads(); ++i) {
      Run& run = runs_[(thread + i) % num_threads()];
      const auto take = [&] { return run.next.fetch_add(1, std::memory_order_relaxed); };
      for (int64_t worker = take(); worker < run.end; worker = take()) body(worker);
    }
  }

 private:
  struct alignas(64) Run {  // a cache line: no thread writes to another's without need
    std::atomic<int64_t> next;
    int64_t end;
  };

  std::vector<Run> runs_;
};

}  // namespace tree_attention::cpu
