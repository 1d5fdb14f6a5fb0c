// SPDX-License-Identifier: BSD-3-Clause
//
// What the machine can do at best: the ceilings that benchmarks report shares of. Every function
// uses the threads of at::parallel_for, the ones the operators run on.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

namespace tree_attention::cpu {

// Pins thread i to cpus[i]; returns the CPU each thread then runs on, -1 for a thread that could
// not be pinned (no CPU given, or a system without thread affinity).
std::vector<int> pin_threads(const std::vector<int>& cpus);

// Reads every byte of the buffers (address, number of bytes) once; the value keeps the compiler
// from dropping the loads.
uint64_t read_memory(const std::vector<std::pair<uintptr_t, int64_t>>& buffers);

// Runs `repeats` rounds of independent float32 fused multiply-adds in registers on every thread;
// returns the floating-point operations done, two for each multiply-add.
double multiply_add(int64_t repeats);

}  // namespace tree_attention::cpu
