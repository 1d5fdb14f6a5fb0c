// SPDX-License-Identifier: BSD-3-Clause
//
// Parallel loops that also end in a forked child: OpenMP's threads stay with the parent, and a
// child would wait for them without end.
#pragma once

#include <ATen/Parallel.h>
#include <pthread.h>

namespace tree_attention::cpu {

inline bool is_forked = false;

inline const int register_at_fork = pthread_atfork(nullptr, nullptr, [] { is_forked = true; });

template <typename Body>
void parallel_for(int64_t begin, int64_t end, int64_t grain, const Body& body) {
  if (is_forked) {
    if (begin < end) body(begin, end);
  } else {
    at::parallel_for(begin, end, grain, body);
  }
}

}  // namespace tree_attention::cpu
