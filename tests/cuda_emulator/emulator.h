// SPDX-License-Identifier: BSD-3-Clause
//
// CUDA for g++: with this header in the place of nvcc's built-ins the sources of a kernel,
// unchanged, are a program for the host (see machine.h). It has what csrc/cuda/device.h allows and
// no more.
#pragma once

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <source_location>
#include <type_traits>

#include "cuda_runtime_api.h"
#include "machine.h"
#include "ptx_hopper_host.h"
#include "ptx_host.h"
#include "warp_functions.h"

#define __host__
#define __device__
#define __global__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))

struct emulator_index {
  unsigned x, y, z;
};
extern emulator_index threadIdx, blockIdx, blockDim, gridDim;

struct __align__(8) int2 {
  int x, y;
};
struct __align__(16) int4 {
  int x, y, z, w;
};
struct __align__(8) uint2 {
  unsigned x, y;
};
struct __align__(16) uint4 {
  unsigned x, y, z, w;
};
struct __align__(8) float2 {
  float x, y;
};
struct __align__(16) float4 {
  float x, y, z, w;
};
inline int2 make_int2(int x, int y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

template <typename T>
T min(T a, T b) {
  return b < a ? b : a;
}
template <typename T>
T max(T a, T b) {
  return a < b ? b : a;
}

inline int __clz(int x) { return std::countl_zero(static_cast<unsigned>(x)); }

inline void __syncthreads(std::source_location where = std::source_location::current()) {
  tree_attention::emulator::block_barrier(where);
}

inline void __syncwarp(unsigned mask = 0xffffffff,
                       std::source_location where = std::source_location::current()) {
  tree_attention::emulator::require_full_mask(mask, where);
  tree_attention::emulator::warp_barrier(where);
}

inline void __threadfence(std::source_location where = std::source_location::current()) {
  tree_attention::emulator::switch_point(tree_attention::emulator::At::kFence, where);
}

template <typename T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32,
              std::source_location where = std::source_location::current()) {
  return tree_attention::emulator::shuffle(
      "__shfl_sync", mask, value, source, width, where,
      [](int lane, int source, int width) { return lane / width * width + source % width; });
}

// Lanes without a source keep their value.
template <typename T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32,
                 std::source_location where = std::source_location::current()) {
  return tree_attention::emulator::shuffle(
      "__shfl_up_sync", mask, value, static_cast<int>(delta), width, where,
      [](int lane, int delta, int width) { return lane % width < delta ? lane : lane - delta; });
}

template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32,
                  std::source_location where = std::source_location::current()) {
  return tree_attention::emulator::shuffle("__shfl_xor_sync", mask, value, lane_mask, width, where,
                                           [](int lane, int lane_mask, int width) {
                                             const int source = lane ^ lane_mask;
                                             return source / width > lane / width ? lane : source;
                                           });
}

inline int __any_sync(unsigned mask, int predicate,
                      std::source_location where = std::source_location::current()) {
  return tree_attention::emulator::any(mask, predicate, where);
}

namespace tree_attention::cuda {

// The launch of launch_kernel.h.
template <typename Params>
cudaError_t launch_kernel(void (*kernel)(Params), unsigned num_blocks, unsigned num_threads,
                          size_t shared_bytes, cudaStream_t stream, const Params& params,
                          bool /*early*/ = false, unsigned cluster_size = 1) {
  emulator::launch(
      num_blocks, num_threads, shared_bytes, stream, [kernel, params] { kernel(params); },
      cluster_size);
  return cudaSuccess;
}

template <typename Params>
cudaError_t find_ptx_version(void (*)(Params), int* version) {
  *version = 90;
  return cudaSuccess;
}

template <typename Params>
cudaError_t find_resident_blocks(void (*)(Params), int num_threads, size_t shared_bytes,
                                 int* blocks) {
  *blocks = emulator::most_resident_blocks(num_threads, shared_bytes);
  return cudaSuccess;
}

}  // namespace tree_attention::cuda
