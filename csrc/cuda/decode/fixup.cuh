// SPDX-License-Identifier: BSD-3-Clause
//
// The fix-up of common/fixup.h among thread blocks: partial states in global memory, and the merge
// by the block that arrives last.
#pragma once

#include "common/fixup.h"
#include "cuda/element.cuh"
#include "cuda/merge/merge_tree.cuh"
#include "tile_config.cuh"

namespace tree_attention::cuda {

// Partial states by slot, in the workspace: o [rows, head_dim] and then lse [rows]. Rows that an
// output does not have are neither written nor read.
class PartialStates {
 public:
  // `rows` is a multiple of 4, so that every slot is aligned to 16 bytes.
  __device__ PartialStates(float* memory, int rows, int head_dim)
      : memory_(memory), rows_(rows), head_dim_(head_dim) {}

  __device__ int head_dim() const { return head_dim_; }
  __device__ int64_t slot_size() const { return int64_t{rows_} * (head_dim_ + 1); }  // floats
  __device__ int lse_offset() const { return rows_ * head_dim_; }                    // in a slot
  __device__ float* slot(int64_t index) const { return memory_ + index * slot_size(); }

  // Stores into a slot as OutputSink stores into the caller's tensors.
  struct Sink {
    float *o, *lse;
    int head_dim;

    __device__ void store(int row, int column, const Float4& values) const {
      store_global_float4(o + row * head_dim + column, values);
    }
    __device__ void store_lse(int row, float value) const { lse[row] = value; }
  };
  __device__ Sink sink(int64_t index) const {
    return {slot(index), slot(index) + lse_offset(), head_dim_};
  }

 private:
  float* memory_;
  int rows_, head_dim_;
};

// The parts that one step of the fix-up merges, by their number in the step.
class StepParts {
 public:
  __device__ StepParts(const PartialStates& states, const Contributors& workers,
                       const MergeStep& step)
      : first_(states.slot(partial_slot(workers, step.first))),
        others_(states.slot(partial_slot(workers.first + step.first, false))),
        stride_(static_cast<int>(partial_slot(step.stride, false) * states.slot_size())),
        lse_offset_(states.lse_offset()) {}

  // Part 0 may lie in the other slot of its worker; from part to part it is a stride.
  __device__ const float* o(int part) const {
    return part == 0 ? first_ : others_ + part * stride_;
  }
  __device__ const float* lse(int part) const { return o(part) + lse_offset_; }

 private:
  const float *first_, *others_;
  int stride_;  // no workspace has 2^31 floats (plan.cu)
  int lse_offset_;
};

// The caller's output, or a partial state of it: one sink for both, so that what stores a state is
// compiled once.
template <typename OutputSink>
struct StateSink {
  const OutputSink& output;
  PartialStates::Sink partial;
  bool is_output;

  __device__ void store(int row, int column, const Float4& values) const {
    if (is_output) {
      output.store(row, column, values);
    } else {
      partial.store(row, column, values);
    }
  }
  __device__ void store_lse(int row, float value) const {
    if (is_output) {
      output.store_lse(row, value);
    } else {
      partial.store_lse(row, value);
    }
  }
};

// The end of the scratch memory tells the block's threads whether theirs is the last to arrive.
constexpr int kArrivalFlag = kFixupScratchBytes - 8;

// The weights of a merge in shared memory. A side that is left out has a weight below zero.
struct MergeWeights {
  float a, b;

  static __device__ MergeWeights of(const Merge& merge) {
    const bool both = merge.take == Merge::Take::kBoth;
    return {both || merge.take == Merge::Take::kA ? merge.weight_a : -1.0f,
            both || merge.take == Merge::Take::kB ? merge.weight_b : -1.0f};
  }

  // The merge that these weights belong to, without its lse.
  __device__ Merge merge() const {
    const bool takes_a = !(a < 0.0f), takes_b = !(b < 0.0f);  // NaN is taken
    const Merge::Take take = takes_a ? (takes_b ? Merge::Take::kBoth : Merge::Take::kA)
                                     : (takes_b ? Merge::Take::kB : Merge::Take::kNone);
    return {take, a, b, 0.0f};
  }
};

// One block's merge of the parts of a step. The rows' lse are merged first, over the whole tree of
// parts; then every thread merges o of its own columns with the weights that this gave. The first
// chunk of o is under way before.
template <int kThreads>
class PartsMerger {
 public:
  __device__ PartsMerger(const PartialStates& states, const Contributors& workers,
                         const MergeStep& step, char* scratch)
      : parts_(states, workers, step),
        count_(static_cast<int>(step.count)),
        head_dim_(states.head_dim()),
        lse_(reinterpret_cast<float*>(scratch)),
        weights_(reinterpret_cast<MergeWeights*>(scratch + kMaxNodes * sizeof(float))) {}

  // To be called by all threads. The result goes to `sink`, and may take the place of a part.
  template <typename Sink>
  __device__ void run(int num_rows, const Sink& sink) const {
    const int rows_per_pass = kMaxNodes / count_;
    for (int first_row = 0; first_row < num_rows; first_row += rows_per_pass) {
      const int rows = min(num_rows - first_row, rows_per_pass);
      LoadedParts<Float4> chunk;
      load_chunk(chunk, first_row, rows, threadIdx.x, 0);
      merge_lse(first_row, rows);
      merge_o(chunk, first_row, rows, sink);
      __syncthreads();  // before the scratch memory is written again
    }
  }

 private:
  // What scratch memory has room for. A node is a part of a row: it has the lse of the merged parts
  // that begin with it, and the weights of the merge whose upper side begins with it.
  static constexpr int kMaxNodes = kArrivalFlag / (sizeof(float) + sizeof(MergeWeights));
  static_assert(kMaxMergedParts <= kMaxNodes && kMaxNodes * sizeof(float) % 8 == 0);

  // Threads divide nodes among them as if the rows were a power of two, of which this is the
  // logarithm: divisions take long.
  static __device__ int row_bits(int rows) { return 32 - __clz(rows - 1); }

  __device__ void load_lse(int first_row, int rows) const {
    constexpr int kInFlight = 4;  // loads of a thread
    const int shift = row_bits(rows);
    for (int begin = threadIdx.x; begin < count_ << shift; begin += kInFlight * kThreads) {
      float lse[kInFlight];
#pragma unroll
      for (int k = 0; k < kInFlight; ++k) {
        const int i = begin + k * kThreads, row = i & ((1 << shift) - 1), part = i >> shift;
        if (row < rows && part < count_) lse[k] = parts_.lse(part)[first_row + row];
      }
#pragma unroll
      for (int k = 0; k < kInFlight; ++k) {
        const int i = begin + k * kThreads, row = i & ((1 << shift) - 1), part = i >> shift;
        if (row < rows && part < count_) lse_[part * rows + row] = lse[k];
      }
    }
  }

  // The tree of each row, level by level, all nodes of a level side by side.
  __device__ void merge_lse(int first_row, int rows) const {
    load_lse(first_row, rows);
    __syncthreads();
    const int shift = row_bits(rows);
    for (int step = 1; step < count_; step *= 2) {
      const int pairs = (count_ - step - 1) / (2 * step) + 1;  // of a row
#pragma unroll 1
      for (int i = threadIdx.x; i < pairs << shift; i += kThreads) {
        const int row = i & ((1 << shift) - 1);
        if (row >= rows) continue;
        const int a = (i >> shift) * 2 * step * rows + row, b = a + step * rows;
        const Merge merged = merge(lse_[a], lse_[b]);
        lse_[a] = merged.lse;
        weights_[b] = MergeWeights::of(merged);
      }
      __syncthreads();
    }
  }

  // Part `part` of what a thread owns: item i of the rows from first_row on is four columns of one.
  __device__ Float4 load_o(int part, int first_row, int i) const {
    return load_float4(parts_.o(part) + first_row * head_dim_ + 4 * i);
  }

  // The parts of item i from part `first` on.
  __device__ __forceinline__ void load_chunk(LoadedParts<Float4>& chunk, int first_row, int rows,
                                             int i, int first) const {
    if (4 * i >= rows * head_dim_) return;
    chunk.load(first, count_, [&](int part) { return load_o(part, first_row, i); });
  }

  template <typename Sink>
  __device__ void merge_o(LoadedParts<Float4>& chunk, int first_row, int rows,
                          const Sink& sink) const {
    const int columns = head_dim_ / 4;
    for (int i = threadIdx.x; i < rows * columns; i += kThreads) {
      const int row = i / columns, column = i % columns * 4;
      const auto merge_into = [&](Float4& a, const Float4& b, int part) {
        const Merge merged = weights_[part * rows + row].merge();
#pragma unroll
        for (int c = 0; c < 4; ++c) a.value[c] = merged(a.value[c], b.value[c]);
      };
      const auto merge_chunk = [&](int first) {
        const Float4 merged = chunk.merge_all(first, count_, merge_into);
        const int next = first + kPartsInFlight;
        const bool ends = next >= count_;  // the next chunk is the first of the thread's next item
        load_chunk(chunk, first_row, rows, ends ? i + kThreads : i, ends ? 0 : next);
        return merged;
      };
      sink.store(first_row + row, column,
                 merge_parts<kMaxMergedParts, Float4>(count_, merge_chunk, merge_into));
      if (column == 0) sink.store_lse(first_row + row, lse_[row]);
    }
  }

  StepParts parts_;
  int count_, head_dim_;
  float* lse_;             // [count, rows]
  MergeWeights* weights_;  // [count, rows]
};

// Merges the parts of a step, by all threads of one block.
template <int kThreads, typename Sink>
__device__ void merge_step(const PartialStates& states, const Contributors& workers,
                           const MergeStep& step, int num_rows, char* scratch, const Sink& sink) {
  // A result that is no output takes the place of the step's first part.
  const StateSink<Sink> result{sink, states.sink(partial_slot(workers, step.first)),
                               step.completes_output};
  PartsMerger<kThreads>(states, workers, step, scratch).run(num_rows, result);
}

// Counts this block's arrival at a counter of the workspace and returns whether it is the last of
// `expected`. To be called by all threads; `flag` is shared memory for nothing else: threads may
// read it until they meet the first barrier of the next call.
//
// A barrier orders the block's threads before and after thread 0, and its atomic orders them before
// and after the other blocks' (PTX ISA, 8.9.5: causality order is transitive), so that plain loads
// and stores of partial states need no fences of their own.
__device__ __forceinline__ bool arrive(uint32_t* counter, int64_t expected, bool* flag) {
  const uint32_t limit = static_cast<uint32_t>(expected) - 1;
  __syncthreads();
  if (threadIdx.x == 0) *flag = atomic_inc_acq_rel(counter, limit) == limit;
  __syncthreads();
  return *flag;
}

// Called by all threads of a block after they have stored its partial state of an output that it
// shares: whichever block is last to arrive stores the output to `sink`. All threads must be done
// with `scratch` before, and may use it after.
template <int kThreads, typename Sink>
__device__ void complete_output(uint32_t* counters, const PartialStates& states,
                                const Contributors& workers, int num_rows, char* scratch,
                                const Sink& sink) {
  fix_up(
      workers, blockIdx.x - workers.first,
      [&](int64_t counter, int64_t expected) {
        return arrive(counters + counter, expected,
                      reinterpret_cast<bool*>(scratch + kArrivalFlag));
      },
      [&](const MergeStep& step) {
        merge_step<kThreads>(states, workers, step, num_rows, scratch, sink);
      },
      max_merged_parts(num_rows));
}

}  // namespace tree_attention::cuda
