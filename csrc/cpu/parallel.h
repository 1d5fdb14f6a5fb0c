// SPDX-License-Identifier: BSD-3-Clause
//
// Parallel loops that also end in a forked child.
#pragma once

#include <ATen/Parallel.h>
#include <pthread.h>

#include <algorithm>
#include <condition_variable>
#include <exception>
#include <functional>
#include <mutex>
#include <new>
#include <thread>
#include <utility>

#include "cpu/work_queue.h"

namespace tree_attention::cpu {

// The thread that begins the loops of a forked child. OpenMP has a pool of threads for each thread
// that began a loop, and the one that was forked would wait without end for a pool that stayed with
// the parent. Nothing tells whether it has one: torch's operators make it, too. A thread of the
// child's own has none, and gets one. It has none of torch's state of a thread, as the gradient and
// inference modes: bodies of loops call no operators of torch.
class LoopThread {
 public:
  LoopThread() {
    std::thread([this] { serve(); }).detach();
  }

  void run(const std::function<void()>& loop) {
    const std::lock_guard<std::mutex> turn(turn_);
    std::unique_lock<std::mutex> lock(mutex_);
    loop_ = &loop;
    changed_.notify_all();
    changed_.wait(lock, [this] { return loop_ == nullptr; });
    if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
  }

 private:
  void serve() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      changed_.wait(lock, [this] { return loop_ != nullptr; });
      try {
        at::init_num_threads();  // which may have changed
        (*loop_)();
      } catch (...) {
        error_ = std::current_exception();
      }
      loop_ = nullptr;
      changed_.notify_all();
    }
  }

  std::mutex turn_, mutex_;
  std::condition_variable changed_;
  const std::function<void()>* loop_ = nullptr;
  std::exception_ptr error_;
};

inline bool is_forked = false;
inline std::mutex making_loop_thread;
inline LoopThread* loop_thread = nullptr;  // of this process; never destroyed, as its thread stays

inline const int register_at_fork = pthread_atfork(nullptr, nullptr, [] {
  is_forked = true;
  new (&making_loop_thread) std::mutex;  // a thread that is not here may have held it
  loop_thread = nullptr;
});

inline LoopThread& loop_thread_of_child() {
  const std::lock_guard<std::mutex> lock(making_loop_thread);
  if (loop_thread == nullptr) loop_thread = new LoopThread;
  return *loop_thread;
}

template <typename Body>
void parallel_for(int64_t begin, int64_t end, int64_t grain, const Body& body) {
  const bool is_serial =
      end - begin <= grain || at::get_num_threads() == 1 || at::in_parallel_region();
  if (!is_forked || is_serial) return at::parallel_for(begin, end, grain, body);
  loop_thread_of_child().run([&] { at::parallel_for(begin, end, grain, body); });
}

// Calls body(task) for every task, on up to `num_threads` threads, which take over from each other.
template <typename Body>
void for_each_task(int64_t num_tasks, int64_t num_threads, const Body& body) {
  WorkQueue queue(num_tasks, std::min(num_tasks, num_threads));
  parallel_for(0, queue.num_threads(), 1, [&](int64_t begin, int64_t end) {
    for (int64_t thread = begin; thread < end; ++thread) queue.run(thread, body);
  });
}

}  // namespace tree_attention::cpu
