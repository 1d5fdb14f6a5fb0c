// SPDX-License-Identifier: BSD-3-Clause
#include "append_kv.cuh"

#include <type_traits>

#include "common/quantise.h"
#include "cuda/element.cuh"

namespace tree_attention::cuda {
namespace {

constexpr int kThreads = 128, kWarps = kThreads / 32;

// Rows of the keys, and as many of the values.
__host__ __device__ int64_t num_rows(const AppendParams& p) {
  return p.batch * p.tokens * p.num_heads_kv;
}

// To be called by all threads of a warp.
template <typename From>
__device__ uint32_t largest_magnitude(const From* row, int64_t head_dim) {
  uint32_t largest = 0;
  for (int64_t d = threadIdx.x % 32; d < head_dim; d += 32) {
    largest = max(largest, magnitude_bits(to_float(row[d])));
  }
  for (int distance = 16; distance > 0; distance /= 2) {
    largest = max(largest, __shfl_xor_sync(0xffffffff, largest, distance));
  }
  return largest;
}

// To be called by all threads of a warp, whose lanes take neighbours whatever the alignment.
template <typename From, typename To>
__device__ void append_row(const From* row, int64_t head_dim, To* out, float* scale) {
  const int lane = threadIdx.x % 32;
  if constexpr (sizeof(To) == 1) {
    float divisor = 1.0f;
    if (scale != nullptr) {
      divisor = scale_of_row<To>(largest_magnitude(row, head_dim));
      if (lane == 0) *scale = divisor;
    }
    for (int64_t d = lane; d < head_dim; d += 32) {
      out[d] = divisor > 0.0f ? quantised<To>(to_float(row[d]) / divisor) : To{};
    }
  } else {
    for (int64_t d = lane; d < head_dim; d += 32) {
      if constexpr (std::is_same_v<From, To>) {
        out[d] = row[d];
      } else {
        out[d] = from_float<To>(to_float(row[d]));
      }
    }
  }
}

// Grid: a warp for every row of the keys, then for every row of the values.
template <typename From, typename To>
__global__ void __launch_bounds__(kThreads) append_kv_kernel(const AppendParams p) {
  const int64_t warp = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (warp >= 2 * num_rows(p)) return;
  const bool is_key = warp < num_rows(p);
  const int64_t row = is_key ? warp : warp - num_rows(p);
  const int64_t head = row % p.num_heads_kv, token = row / p.num_heads_kv % p.tokens,
                batch = row / p.num_heads_kv / p.tokens;
  const int64_t slot = p.slots[batch * p.slots_stride[0] + token * p.slots_stride[1]];
  if (slot < 0 || slot >= p.capacity) return;
  const int64_t outer = p.page_size == 0 ? batch : slot / p.page_size;
  const int64_t inner = p.page_size == 0 ? slot : slot % p.page_size;
  const auto place = [&](const int64_t (&stride)[3]) {
    return outer * stride[0] + head * stride[1] + inner * stride[2];
  };
  const AppendTensor& x = is_key ? p.k : p.v;
  append_row(static_cast<const From*>(x.rows) + batch * x.stride[0] + head * x.stride[1] +
                 token * x.stride[2],
             x.head_dim, static_cast<To*>(x.cache) + place(x.cache_stride),
             x.scale == nullptr ? nullptr : x.scale + place(x.scale_stride));
}

}  // namespace

cudaError_t launch_append_kv(const AppendParams& params, cudaStream_t stream) {
  const int64_t warps = 2 * num_rows(params);
  if (warps == 0) return cudaSuccess;
  return with_dtype(params.dtype, [&]<typename From>() {
    return with_kv_dtype(params.cache_dtype, [&]<typename To>() {
      return launch_kernel(append_kv_kernel<From, To>,
                           static_cast<unsigned>((warps + kWarps - 1) / kWarps), kThreads, 0,
                           stream, params);
    });
  });
}

}  // namespace tree_attention::cuda
