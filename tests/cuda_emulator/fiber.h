// SPDX-License-Identifier: BSD-3-Clause
//
// Fibers: functions with a stack of their own that one OS thread runs in turn.
#pragma once

#include <cstddef>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace tree_attention::emulator {

class Fiber {
 public:
  Fiber();                                      // the stack that the caller runs on
  Fiber(void (*entry)(void*), void* argument);  // a new stack; `entry` must never return
  ~Fiber();                                     // also of a fiber that has not come to its end
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // Leaves `from`, which must be running, until something resumes it. Called while Hidden.
  static void resume(Fiber& to, Fiber& from);

 private:
  static void run(Fiber* fiber);
  void arrive();

  void (*entry_)(void*) = nullptr;
  void* argument_ = nullptr;
  char* stack_ = nullptr;  // lowest address; null: not owned
#if defined(__x86_64__)
  void* stack_pointer_ = nullptr;
#else
  ucontext_t context_;
#endif
#if defined(__SANITIZE_ADDRESS__)
  const void* bounds_ = nullptr;
  size_t bounds_size_ = 0;
  void* fake_stack_ = nullptr;
#endif
#if defined(__SANITIZE_THREAD__)
  void* thread_ = nullptr;
#endif
};

}  // namespace tree_attention::emulator
