// SPDX-License-Identifier: BSD-3-Clause
//
// Stands for torch's header where the kernels run under sanitizers: the same interface on
// std::thread, whose synchronisation ThreadSanitizer sees. It does not see that of libgomp.
#pragma once

#include <algorithm>
#include <cstdint>
#include <thread>
#include <vector>

namespace at {

inline int num_threads = 1;
inline thread_local bool inside_parallel_region = false;

inline void set_num_threads(int count) { num_threads = count; }
inline void init_num_threads() {}
inline int get_num_threads() { return inside_parallel_region ? 1 : num_threads; }
inline bool in_parallel_region() { return inside_parallel_region; }

template <typename F>
void parallel_for(int64_t begin, int64_t end, int64_t grain, const F& body) {
  if (begin >= end) return;
  const int64_t chunks =
      std::min<int64_t>(get_num_threads(), (end - begin + grain - 1) / std::max<int64_t>(1, grain));
  if (chunks <= 1) return body(begin, end);
  const int64_t chunk = (end - begin + chunks - 1) / chunks;
  std::vector<std::thread> threads;
  for (int64_t first = begin; first < end; first += chunk) {
    threads.emplace_back([&body, first, last = std::min(end, first + chunk)] {
      inside_parallel_region = true;
      body(first, last);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace at
