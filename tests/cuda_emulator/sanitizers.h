// SPDX-License-Identifier: BSD-3-Clause
//
// What the sanitizers must be told about fibers. Every function here is empty in a plain build.
#pragma once

#include <cstddef>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
extern "C" {
void AnnotateIgnoreReadsBegin(const char* file, int line);
void AnnotateIgnoreReadsEnd(const char* file, int line);
void AnnotateIgnoreWritesBegin(const char* file, int line);
void AnnotateIgnoreWritesEnd(const char* file, int line);
void __tsan_read_range(void* address, unsigned long size);
void __tsan_write_range(void* address, unsigned long size);
}
#endif

namespace tree_attention::emulator {

#if defined(__SANITIZE_THREAD__)
inline constexpr bool kThreadSanitizer = true;

inline void hide_accesses() {
  AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
  AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
}
inline void show_accesses() {
  AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
  AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
}

// What was before a release happens before what follows an acquire of the same object.
inline void acquire(void* object) { __tsan_acquire(object); }
inline void release(void* object) { __tsan_release(object); }

// Accesses of the kernel that the emulator does for it; outside Hidden.
inline void record_read(const void* address, size_t size) {
  __tsan_read_range(const_cast<void*>(address), size);
}
inline void record_write(void* address, size_t size) { __tsan_write_range(address, size); }
#else
inline constexpr bool kThreadSanitizer = false;

inline void hide_accesses() {}
inline void show_accesses() {}
inline void acquire(void*) {}
inline void release(void*) {}
inline void record_read(const void*, size_t) {}
inline void record_write(void*, size_t) {}
#endif

#if defined(__SANITIZE_ADDRESS__)
inline void forbid_access(void* address, size_t size) {
  __asan_poison_memory_region(address, size);
}
inline void allow_access(void* address, size_t size) {
  __asan_unpoison_memory_region(address, size);
}
#else
inline void forbid_access(void*, size_t) {}
inline void allow_access(void*, size_t) {}
#endif

// Memory accesses of the emulator itself are no accesses of the kernel. Of one that may race only
// the writes need this.
class Hidden {
 public:
  Hidden() { hide_accesses(); }
  ~Hidden() { show_accesses(); }
  Hidden(const Hidden&) = delete;
};

}  // namespace tree_attention::emulator
