// SPDX-License-Identifier: BSD-3-Clause
#include "fiber.h"

#include <sys/mman.h>

#include <cstdint>
#include <cstdlib>
#include <new>
#include <vector>

#include "sanitizers.h"

#if defined(__x86_64__)
// void switch_stack(void** old_stack_pointer, void* new_stack_pointer): what a call must preserve
// is kept on the stack that is left. swapcontext does the same at ten times the cost, because it
// makes a system call.
extern "C" void tree_attention_emulator_switch_stack(void** old_stack_pointer,
                                                     void* new_stack_pointer);
asm(R"(
.text
.globl tree_attention_emulator_switch_stack
.type tree_attention_emulator_switch_stack, @function
tree_attention_emulator_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size tree_attention_emulator_switch_stack, .-tree_attention_emulator_switch_stack
)");
#endif

namespace tree_attention::emulator {
namespace {

constexpr size_t kGuard = 4096, kStackSize = (kThreadSanitizer ? 64 : 256) * 1024;

// Stacks are used again, except under ThreadSanitizer: to it a new mapping is new memory.
class StackPool {
 public:
  ~StackPool() {
    for (char* stack : free_) unmap(stack);
  }

  char* take() {
    if (!free_.empty()) {
      char* stack = free_.back();
      free_.pop_back();
      return stack;
    }
    void* mapping = mmap(nullptr, kGuard + kStackSize, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapping == MAP_FAILED) throw std::bad_alloc();
    mprotect(mapping, kGuard, PROT_NONE);
    return static_cast<char*>(mapping) + kGuard;
  }

  void give_back(char* stack) {
    // Frames of a fiber that never came to its end are still marked.
    allow_access(stack, kStackSize);
    if (kThreadSanitizer) {
      unmap(stack);
    } else {
      free_.push_back(stack);
    }
  }

 private:
  static void unmap(char* stack) { munmap(stack - kGuard, kGuard + kStackSize); }

  std::vector<char*> free_;
};

StackPool stacks;
Fiber* resumed;
Fiber* left;

}  // namespace

Fiber::Fiber() {
#if defined(__SANITIZE_THREAD__)
  thread_ = __tsan_get_current_fiber();
#endif
}

Fiber::Fiber(void (*entry)(void*), void* argument)
    : entry_(entry), argument_(argument), stack_(stacks.take()) {
#if defined(__SANITIZE_ADDRESS__)
  bounds_ = stack_;
  bounds_size_ = kStackSize;
#endif
#if defined(__SANITIZE_THREAD__)
  thread_ = __tsan_create_fiber(0);
#endif
#if defined(__x86_64__)
  // As switch_stack finds it: six registers, then where to return to, then an empty caller. A
  // function begins with its stack pointer 8 below a multiple of 16.
  void** top = reinterpret_cast<void**>(stack_ + kStackSize);
  *--top = nullptr;
  *--top = reinterpret_cast<void*>(+[] { run(resumed); });
  for (int i = 0; i < 6; ++i) *--top = nullptr;
  stack_pointer_ = top;
#else
  getcontext(&context_);
  context_.uc_stack.ss_sp = stack_;
  context_.uc_stack.ss_size = kStackSize;
  context_.uc_link = nullptr;
  makecontext(&context_, +[] { run(resumed); }, 0);
#endif
}

Fiber::~Fiber() {
  if (stack_ == nullptr) return;
#if defined(__SANITIZE_THREAD__)
  __tsan_destroy_fiber(thread_);
#endif
  stacks.give_back(stack_);
}

void Fiber::resume(Fiber& to, Fiber& from) {
  resumed = &to;
  left = &from;
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(&from.fake_stack_, to.bounds_, to.bounds_size_);
#endif
#if defined(__SANITIZE_THREAD__)
  void* const thread = to.thread_;
  show_accesses();  // in case `from` never runs again
  __tsan_switch_to_fiber(thread, __tsan_switch_to_fiber_no_sync);
#endif
#if defined(__x86_64__)
  tree_attention_emulator_switch_stack(&from.stack_pointer_, to.stack_pointer_);
#else
  swapcontext(&from.context_, &to.context_);
#endif
  hide_accesses();
  from.arrive();
}

// The first thing on the stack that was switched to.
void Fiber::arrive() {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(fake_stack_, &left->bounds_, &left->bounds_size_);
#endif
}

void Fiber::run(Fiber* fiber) {
  fiber->arrive();
  fiber->entry_(fiber->argument_);
  std::abort();
}

}  // namespace tree_attention::emulator
