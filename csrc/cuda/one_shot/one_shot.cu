// SPDX-License-Identifier: BSD-3-Clause
#include "one_shot.cuh"

#include <algorithm>
#include <type_traits>

#include "cuda/element.cuh"
#include "cuda/merge/merge_tree.cuh"

namespace tree_attention::cuda {
namespace {

constexpr int kThreads = 256;
static_assert(kOneShotMaxRanks <= 32);  // a warp waits for all ranks
// Polls of a flag between two looks at the deadline and at the abort word. A poll takes most of a
// microsecond; those words are in host memory, which is further away.
constexpr uint32_t kPollsPerCheck = 64;

struct __align__(kOneShotAlignment) Bytes {
  uint32_t words[4];
};

// Neighbouring columns that move in accesses of at most 16 bytes.
template <typename Element, int kCount>
struct __align__(sizeof(Element) * kCount < 16 ? sizeof(Element) * kCount : 16) Columns {
  Element value[kCount];
};

struct Launch {
  OneShotParams params;
  int64_t rows_per_block;
};

__host__ __device__ int64_t row_bytes(const OneShotParams& p) {
  return int64_t{p.head_dim} * element_size(p.dtype);
}

// The rows of one block.
struct Slice {
  int64_t begin, count;
};

class Exchange {
 public:
  __device__ explicit Exchange(const OneShotParams& p, uint32_t epoch) : p_(p), epoch_(epoch) {}

  // Stores this block's slice of the rank's state into the buffers of all ranks, its own included.
  // Every rank begins with another one, so that no buffer is written by all of them at a time.
  __device__ void send(const Slice& slice) const {
    const int64_t offset = slice.begin * row_bytes(p_);
    const auto* o = reinterpret_cast<const Bytes*>(static_cast<const char*>(p_.o) + offset);
    const int64_t num_vectors = slice.count * row_bytes(p_) / kOneShotAlignment;
    for (int64_t i = threadIdx.x; i < num_vectors; i += kThreads) {
      const Bytes bytes = o[i];
      for (int step = 1; step <= p_.world_size; ++step) {
        char* slot = slot_in((p_.rank + step) % p_.world_size, p_.rank);
        reinterpret_cast<Bytes*>(slot + offset)[i] = bytes;
      }
    }
    for (int64_t i = threadIdx.x; i < slice.count; i += kThreads) {
      const float lse = p_.lse[slice.begin + i];
      for (int step = 1; step <= p_.world_size; ++step) {
        lse_of(slot_in((p_.rank + step) % p_.world_size, p_.rank))[slice.begin + i] = lse;
      }
    }
  }

  // Tells every rank that the slice is there and waits for theirs; returns whether all came. To be
  // called by a whole warp, after a barrier.
  __device__ bool meet() const {
    const int peer = threadIdx.x;
    OneShotError error = OneShotError::kNone;
    if (peer < p_.world_size) {
      // The flag has the sizes too, so that ranks which do not agree on them find out.
      const uint64_t value =
          uint64_t{epoch_} << 32 | static_cast<uint32_t>(p_.num_rows * 0x9e3779b1 + row_bytes(p_));
      store_release_system(flag_in(peer, p_.rank), value);
      error = wait_for(flag_in(p_.rank, peer), value);
      if (error != OneShotError::kNone) {
        store_release_system(reinterpret_cast<uint64_t*>(&p_.host->error[peer]),
                             static_cast<uint64_t>(error));
      }
    }
    return !__any_sync(0xffffffff, error != OneShotError::kNone);
  }

  // Merges this block's rows of all ranks' states in rank order and stores them. To be called after
  // a barrier.
  template <typename In, typename Out>
  __device__ void merge_all(const Slice& slice) const {
    constexpr int kCount = kOneShotAlignment / sizeof(In);
    using State = RowState<kCount>;
    const int vectors_per_row = p_.head_dim / kCount;
    for (int64_t i = threadIdx.x; i < slice.count * vectors_per_row; i += kThreads) {
      const int64_t row = slice.begin + i / vectors_per_row;
      const int column = static_cast<int>(i % vectors_per_row) * kCount;
      const auto load = [&](int source) {
        const char* slot = slot_in(p_.rank, source);
        const In* o = reinterpret_cast<const In*>(slot) + row * p_.head_dim + column;
        const auto columns = *reinterpret_cast<const Columns<In, kCount>*>(o);
        State state;
        state.lse = lse_of(slot)[row];
#pragma unroll
        for (int k = 0; k < kCount; ++k) {
          // A lone empty state, in a world of one, is merged with nothing: its o is left out here.
          state.o[k] = state.lse == -INFINITY ? 0.0f : to_float(columns.value[k]);
        }
        return state;
      };
      const auto merge_into = [](State& a, const State& b, int) { a.merge_with(b); };
      const auto merge_chunk = [&](int first) {
        LoadedParts<State> chunk;
        chunk.load(first, p_.world_size, load);
        return chunk.merge_all(first, p_.world_size, merge_into);
      };
      store<Out>(row, column,
                 merge_parts<kOneShotMaxRanks, State>(p_.world_size, merge_chunk, merge_into));
    }
  }

  template <typename In, typename Out>
  __device__ void poison(const Slice& slice) const {
    constexpr int kCount = kOneShotAlignment / sizeof(In);
    RowState<kCount> state;
    state.lse = NAN;
#pragma unroll
    for (int k = 0; k < kCount; ++k) state.o[k] = NAN;
    const int vectors_per_row = p_.head_dim / kCount;
    for (int64_t i = threadIdx.x; i < slice.count * vectors_per_row; i += kThreads) {
      store<Out>(slice.begin + i / vectors_per_row, static_cast<int>(i % vectors_per_row) * kCount,
                 state);
    }
  }

 private:
  __device__ char* buffer(int rank) const { return reinterpret_cast<char*>(p_.buffers[rank]); }

  __device__ int parity() const { return epoch_ % 2; }

  __device__ uint64_t* flag_in(int owner, int source) const {
    const int block = parity() * kOneShotMaxBlocks + static_cast<int>(blockIdx.x);
    return reinterpret_cast<uint64_t*>(buffer(owner)) + block * kOneShotMaxRanks + source;
  }

  __device__ char* slot_in(int owner, int source) const {
    return buffer(owner) + kOneShotFlags * sizeof(uint64_t) +
           (parity() * p_.world_size + source) * p_.slot_bytes;
  }

  __device__ float* lse_of(char* slot) const {
    return reinterpret_cast<float*>(slot + p_.num_rows * row_bytes(p_));
  }
  __device__ const float* lse_of(const char* slot) const {
    return reinterpret_cast<const float*>(slot + p_.num_rows * row_bytes(p_));
  }

  __device__ OneShotError wait_for(const uint64_t* flag, uint64_t expected) const {
    uint64_t begin = 0;
    for (uint32_t polls = 1;; ++polls) {
      const uint64_t value = load_acquire_system(flag);
      if (value == expected) return OneShotError::kNone;
      if (value >> 32 == epoch_) return OneShotError::kDiffers;
      if (polls % kPollsPerCheck != 0) continue;
      const uint64_t now = globaltimer();
      if (begin == 0) begin = now;
      if (now - begin > load_acquire_system(&p_.host->timeout)) return OneShotError::kMissing;
      if (load_acquire_system(&p_.host->aborted) != 0) return OneShotError::kAborted;
    }
  }

  template <typename Out, int kCount>
  __device__ void store(int64_t row, int column, const RowState<kCount>& state) const {
    Columns<Out, kCount> columns;
#pragma unroll
    for (int k = 0; k < kCount; ++k) columns.value[k] = from_float<Out>(state.o[k]);
    Out* o = static_cast<Out*>(p_.out_o) + row * p_.head_dim + column;
    *reinterpret_cast<Columns<Out, kCount>*>(o) = columns;
    if (column == 0) p_.out_lse[row] = state.lse;
  }

  const OneShotParams& p_;
  const uint32_t epoch_;
};

template <typename In, typename Out>
__global__ void __launch_bounds__(kThreads, 2)
    one_shot_kernel(const __grid_constant__ Launch launch) {
  const OneShotParams& p = launch.params;
  Slice slice{blockIdx.x * launch.rows_per_block, launch.rows_per_block};
  slice.count = min(slice.count, p.num_rows - slice.begin);
  OneShotControl& control = *p.control;
  const Exchange exchange(p, control.epoch + 1);
  if (control.failed != 0) {
    exchange.poison<In, Out>(slice);
    return;
  }
  exchange.send(slice);
  // Without this: flags are raised before all threads have sent.
  __syncthreads();
  uint32_t* all_came = reinterpret_cast<uint32_t*>(dynamic_shared_memory());
  if (threadIdx.x < 32) {
    const bool came = exchange.meet();
    if (threadIdx.x == 0) *all_came = came;
  }
  // Without this: threads merge before the waiting ones have seen the flags.
  __syncthreads();
  if (*all_came) {
    exchange.merge_all<In, Out>(slice);
  } else {
    exchange.poison<In, Out>(slice);
  }
  if (threadIdx.x != 0) return;
  // All blocks have read the epoch when the last one changes it.
  if (!*all_came) atomic_inc_acq_rel(&control.failing, UINT32_MAX);
  if (atomic_inc_acq_rel(&control.arrived, gridDim.x - 1) == gridDim.x - 1) {
    control.failed = control.failing;
    ++control.epoch;
  }
}

template <typename In, typename Out>
cudaError_t launch(const OneShotParams& p, cudaStream_t stream) {
  if (p.num_rows == 0) return cudaSuccess;
  // A block has at least a vector for each of its threads, and more where the grid is full.
  const int64_t vectors_per_row = row_bytes(p) / kOneShotAlignment;
  const int64_t rows_of_threads = (kThreads + vectors_per_row - 1) / vectors_per_row;
  const int64_t rows_of_grid = (p.num_rows + kOneShotMaxBlocks - 1) / kOneShotMaxBlocks;
  const int64_t rows_per_block = std::max(rows_of_threads, rows_of_grid);
  const auto num_blocks = static_cast<unsigned>((p.num_rows + rows_per_block - 1) / rows_per_block);
  return launch_kernel(one_shot_kernel<In, Out>, num_blocks, kThreads, sizeof(uint32_t), stream,
                       Launch{p, rows_per_block});
}

}  // namespace

cudaError_t launch_one_shot(const OneShotParams& params, cudaStream_t stream) {
  return with_dtype(params.dtype, [&]<typename In>() {
    if constexpr (std::is_same_v<In, Float16>) {
      return cudaErrorInvalidValue;  // one_shot_args.cpp refuses it
    } else {
      return with_dtype(params.out_dtype,
                        [&]<typename Out>() { return launch<In, Out>(params, stream); });
    }
  });
}

}  // namespace tree_attention::cuda
