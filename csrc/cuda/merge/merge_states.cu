// SPDX-License-Identifier: BSD-3-Clause
#include "merge_states.cuh"

#include <bit>

#include "cuda/element.cuh"
#include "merge_tree.cuh"

namespace tree_attention::cuda {
namespace {

constexpr int kThreads = 128, kWarps = kThreads / 32;
constexpr int kValues = 4;  // of o per thread
constexpr int kColumns = 32 * kValues;

// The columns of a lane are 32 apart, so that a warp reads neighbours whatever the alignment.
using State = RowState<kValues>;

// Chunks are merged in registers, their states on a stack in shared memory.
__host__ __device__ int64_t num_chunks(const MergeParams& p) {
  return (p.num_parts + kPartsInFlight - 1) / kPartsInFlight;
}

// Grid: a warp for every kColumns columns of a row. Each lane repeats the row's few scalar merges,
// so that threads exchange nothing.
template <typename In, typename Out>
__global__ void __launch_bounds__(kThreads) merge_states_kernel(const MergeParams p) {
  const int64_t warps_per_row = (p.head_dim + kColumns - 1) / kColumns;
  const int64_t warp = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  const int64_t row = warp / warps_per_row;
  if (row >= p.num_rows) return;
  const int64_t first_column = warp % warps_per_row * kColumns + threadIdx.x % 32;

  const auto load = [&](int64_t part) {
    State state;
    state.lse = p.lse_parts[part * p.lse_stride[0] + row * p.lse_stride[1]];
    const In* o = static_cast<const In*>(p.o_parts) + part * p.o_stride[0] + row * p.o_stride[1];
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      const int64_t column = first_column + 32 * i;
      const float value = column < p.head_dim ? to_float(o[column]) : 0.0f;
      // A lone empty part is merged with nothing, so that its `o` is left out here.
      state.o[i] = state.lse == -INFINITY ? 0.0f : value;
    }
    return state;
  };
  const auto merge_into = [](State& a, const State& b, int64_t) { a.merge_with(b); };
  State* stack = reinterpret_cast<State*>(dynamic_shared_memory()) + threadIdx.x;
  merge_in_canonical_order(
      num_chunks(p),
      [&](int64_t chunk, int slot) {
        const int64_t first = chunk * kPartsInFlight;
        LoadedParts<State> parts;
        parts.load(first, p.num_parts, load);
        stack[slot * kThreads] = parts.merge_all(first, p.num_parts, merge_into);
      },
      [&](int a, int b) { stack[a * kThreads].merge_with(stack[b * kThreads]); });

  Out* out = static_cast<Out*>(p.o) + row * p.head_dim;
#pragma unroll
  for (int i = 0; i < kValues; ++i) {
    const int64_t column = first_column + 32 * i;
    if (column < p.head_dim) out[column] = from_float<Out>(stack[0].o[i]);
  }
  if (first_column == 0) p.lse[row] = stack[0].lse;
}

template <typename In, typename Out>
cudaError_t launch(const MergeParams& params, cudaStream_t stream) {
  const int64_t warps = params.num_rows * ((params.head_dim + kColumns - 1) / kColumns);
  if (warps == 0) return cudaSuccess;
  // A binary counter up to num_chunks has this many digits, each with a slot.
  const int slots = std::bit_width(static_cast<uint64_t>(num_chunks(params)));
  return launch_kernel(merge_states_kernel<In, Out>,
                       static_cast<unsigned>((warps + kWarps - 1) / kWarps), kThreads,
                       slots * kThreads * sizeof(State), stream, params);
}

}  // namespace

cudaError_t launch_merge_states(const MergeParams& params, cudaStream_t stream) {
  return with_dtype(params.dtype, [&]<typename In>() {
    return with_dtype(params.out_dtype,
                      [&]<typename Out>() { return launch<In, Out>(params, stream); });
  });
}

}  // namespace tree_attention::cuda
