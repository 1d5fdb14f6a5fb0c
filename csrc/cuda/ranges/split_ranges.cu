// SPDX-License-Identifier: BSD-3-Clause
#include "split_ranges.cuh"

#include "cuda/device.h"

namespace tree_attention::cuda {
namespace {

constexpr int kThreads = 128;

__host__ __device__ int64_t num_ranges(const RangeParams& p) {
  return p.batch * p.seqlen_q * p.num_ranges;
}

// Finds the place of range `i` among the ranges of its query by looking at all of them: a sort
// would need shared memory, and the ranges are few.
__device__ void split_range(const RangeParams& p, int64_t i) {
  const int64_t own = i % p.num_ranges, query = i / p.num_ranges;
  const int64_t token = query % p.seqlen_q, batch = query / p.seqlen_q;
  const int32_t* ranges = p.ranges + batch * p.ranges_stride[0] + token * p.ranges_stride[1];
  const int32_t* range = ranges + own * p.ranges_stride[2];
  const int32_t begin = range[0], end = range[1];
  int64_t before = 0;
  int32_t covered = begin;  // the largest end of the ranges before this one
  for (int64_t other = 0; other < p.num_ranges; ++other) {
    const int32_t other_begin = ranges[other * p.ranges_stride[2]];
    const int32_t other_end = ranges[other * p.ranges_stride[2] + 1];
    const bool is_before = other_begin != begin ? other_begin < begin
                           : other_end != end   ? other_end < end
                                                : other < own;
    if (!is_before) continue;
    ++before;
    covered = max(covered, other_end);
  }
  int32_t* part = p.parts + ((before * p.batch + batch) * p.seqlen_q + token) * 2;
  part[0] = covered;
  part[1] = end;
}

// Copies an element of what every range has of its own.
__device__ void repeat(const RangeParams& p, const RepeatedTensor& x, int64_t i) {
  const int64_t column = i % x.row_size, row = i / x.row_size;
  const int64_t second = row % x.num_rows[1], rest = row / x.num_rows[1];
  const int64_t first = rest % x.num_rows[0], batch = rest / x.num_rows[0];
  const uint16_t element =
      x.from[batch * x.stride[0] + first * x.stride[1] + second * x.stride[2] + column];
  for (int64_t range = 0; range < p.num_ranges; ++range) {
    x.to[range * p.batch * x.size_of_sequence() + i] = element;
  }
}

// Grid: a thread for every range of every query, then for every sequence of every range, then for
// every element that is repeated.
__global__ void __launch_bounds__(kThreads) split_ranges_kernel(const RangeParams p) {
  int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i < num_ranges(p)) return split_range(p, i);
  i -= num_ranges(p);
  if (p.sequences != nullptr) {
    const int64_t count = p.num_ranges * p.batch;
    if (i < count) {
      p.sequences[i] = static_cast<int32_t>(i % p.batch);
      return;
    }
    i -= count;
  }
  for (int k = 0; k < p.num_repeated; ++k) {
    const int64_t count = p.batch * p.repeated[k].size_of_sequence();
    if (i < count) return repeat(p, p.repeated[k], i);
    i -= count;
  }
}

}  // namespace

cudaError_t launch_split_ranges(const RangeParams& p, cudaStream_t stream) {
  int64_t threads = num_ranges(p);
  if (p.sequences != nullptr) threads += p.num_ranges * p.batch;
  for (int k = 0; k < p.num_repeated; ++k) threads += p.batch * p.repeated[k].size_of_sequence();
  if (threads == 0) return cudaSuccess;
  return launch_kernel(split_ranges_kernel,
                       static_cast<unsigned>((threads + kThreads - 1) / kThreads), kThreads, 0,
                       stream, p);
}

}  // namespace tree_attention::cuda
