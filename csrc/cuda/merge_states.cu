// SPDX-License-Identifier: BSD-3-Clause
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "../common/softmax_state.h"
#include "merge_states.cuh"

namespace tree_attention::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kValues = 4;  // of head_dim per thread
constexpr int kSlots = 32;  // stack of the canonical order: enough for 2^31 parts

__device__ float to_float(float x) { return x; }
__device__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ float to_float(__half x) { return __half2float(x); }
__device__ void store(float* out, float x) { *out = x; }
__device__ void store(__nv_bfloat16* out, float x) { *out = __float2bfloat16_rn(x); }
__device__ void store(__half* out, float x) { *out = __float2half_rn(x); }

// Grid: one thread for kValues consecutive values of a row, rows end to end. Every thread of a row
// repeats the row's few scalar merges: nothing is exchanged between threads.
template <typename In, typename Out>
__global__ void __launch_bounds__(kThreads) merge_states_kernel(const MergeParams p) {
  const int64_t threads_per_row = (p.head_dim + kValues - 1) / kValues;
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t row = thread / threads_per_row;
  if (row >= p.num_rows) return;
  const int64_t first = thread % threads_per_row * kValues;
  const int count = static_cast<int>(min(static_cast<int64_t>(kValues), p.head_dim - first));

  float lse[kSlots];
  float o[kSlots][kValues];
  const auto load = [&](int64_t part, int slot) {
    lse[slot] = p.lse_parts[part * p.lse_stride[0] + row * p.lse_stride[1]];
    const In* values =
        static_cast<const In*>(p.o_parts) + part * p.o_stride[0] + row * p.o_stride[1] + first;
    for (int i = 0; i < kValues; ++i) {
      o[slot][i] = i < count && lse[slot] != -INFINITY ? to_float(values[i]) : 0.0f;
    }
  };
  const auto merge_slots = [&](int a, int b) {
    const Merge merged = merge(lse[a], lse[b]);
    lse[a] = merged.lse;
    for (int i = 0; i < kValues; ++i) o[a][i] = merged(o[a][i], o[b][i]);
  };
  merge_in_canonical_order(p.num_parts, load, merge_slots);

  Out* out = static_cast<Out*>(p.o) + row * p.head_dim + first;
  for (int i = 0; i < count; ++i) store(out + i, o[0][i]);
  if (first == 0) p.lse[row] = lse[0];
}

template <typename In, typename Out>
cudaError_t launch(const MergeParams& params, cudaStream_t stream) {
  const int64_t threads = params.num_rows * ((params.head_dim + kValues - 1) / kValues);
  if (threads == 0) return cudaSuccess;
  const unsigned blocks = static_cast<unsigned>((threads + kThreads - 1) / kThreads);
  merge_states_kernel<In, Out><<<blocks, kThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

template <typename In>
cudaError_t launch(const MergeParams& params, cudaStream_t stream) {
  switch (params.out_dtype) {
    case DataType::kFloat32:
      return launch<In, float>(params, stream);
    case DataType::kBFloat16:
      return launch<In, __nv_bfloat16>(params, stream);
    default:
      return launch<In, __half>(params, stream);
  }
}

}  // namespace

cudaError_t launch_merge_states(const MergeParams& params, cudaStream_t stream) {
  switch (params.dtype) {
    case DataType::kFloat32:
      return launch<float>(params, stream);
    case DataType::kBFloat16:
      return launch<__nv_bfloat16>(params, stream);
    default:
      return launch<__half>(params, stream);
  }
}

}  // namespace tree_attention::cuda
