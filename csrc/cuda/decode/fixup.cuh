// SPDX-License-Identifier: BSD-3-Clause
//
// The fix-up of common/fixup.h among thread blocks: partial states in global memory, and the merge
// by the block that arrives last.
#pragma once

#include "common/fixup.h"
#include "cuda/element.cuh"
#include "cuda/merge/merge_tree.cuh"
#include "softmax.cuh"
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

// The threads that merge, which are the first of a block: here all of it.
struct SyncBlock {
  static __device__ void sync() { __syncthreads(); }
};

// One block's merge of the parts of a step: o = sum w_i o_i with w_i = exp(lse_i - lse) and lse =
// log sum exp(lse_i). Sums are taken in the order of the parts, whoever arrived last: bits depend
// on the cut of the line alone. A warp finds the weights of its rows; then every thread sums o of
// its own columns. The first chunk of o is under way before.
template <int kThreads, typename Sync>
class PartsMerger {
 public:
  __device__ PartsMerger(const PartialStates& states, const Contributors& workers,
                         const MergeStep& step, char* scratch)
      : parts_(states, workers, step),
        count_(static_cast<int>(step.count)),
        head_dim_(states.head_dim()),
        weights_(reinterpret_cast<float*>(scratch)) {}

  // To be called by all threads. The result goes to `sink`, and may take the place of a part.
  template <typename Sink>
  __device__ void run(int num_rows, const Sink& sink) const {
    const int rows_per_pass = kMaxWeights / count_;
    for (int first_row = 0; first_row < num_rows; first_row += rows_per_pass) {
      const int rows = min(num_rows - first_row, rows_per_pass);
      LoadedParts<Float4> chunk;
      load_chunk(chunk, first_row, rows, threadIdx.x, 0);
      find_weights(first_row, rows, sink);
      // Without this: weights are used before they are all computed.
      Sync::sync();
      merge_o(chunk, first_row, rows, sink);
      Sync::sync();  // before the scratch memory is written again
    }
  }

 private:
  static constexpr int kMaxWeights = kArrivalFlag / sizeof(float);
  static constexpr int kPartsOfLane = 2;
  static_assert(kMaxMergedParts <= kPartsOfLane * 32);

  // As many lanes as there are parts, rounded up to a power of two, have a row: they are alone with
  // its lse, whose place the result may take.
  template <typename Sink>
  __device__ void find_weights(int first_row, int rows, const Sink& sink) const {
    const int lane_bits = min(5, 32 - __clz(count_ - 1)), num_lanes = 1 << lane_bits;
    const int lane = threadIdx.x & (num_lanes - 1);
#pragma unroll 1
    for (int begin = 0; begin < rows; begin += kThreads >> lane_bits) {
      const int row = begin + (threadIdx.x >> lane_bits);
      const auto exists = [&](int i) { return row < rows && lane + i * num_lanes < count_; };
      float lse[kPartsOfLane], maximum = kNoMaximum, sum = 0.0f;
#pragma unroll
      for (int i = 0; i < kPartsOfLane; ++i) {
        lse[i] = exists(i) ? parts_.lse(lane + i * num_lanes)[first_row + row] : -INFINITY;
      }
#pragma unroll
      for (int i = 0; i < kPartsOfLane; ++i) maximum = fmaxf(maximum, lse[i]);
      for (int bit = 1; bit < num_lanes; bit *= 2) {
        maximum = fmaxf(maximum, __shfl_xor_sync(0xffffffff, maximum, bit));
      }
      float weights[kPartsOfLane];
#pragma unroll
      for (int i = 0; i < kPartsOfLane; ++i) {
        weights[i] = ex2((lse[i] - maximum) * kLog2E);
        sum += weights[i];
      }
      for (int bit = 1; bit < num_lanes; bit *= 2) {
        sum += __shfl_xor_sync(0xffffffff, sum, bit);
      }
      const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;  // zero: no part has a key
#pragma unroll
      for (int i = 0; i < kPartsOfLane; ++i) {
        if (exists(i)) weights_[(lane + i * num_lanes) * rows + row] = weights[i] * inverse;
      }
      if (row < rows && lane == 0) {
        sink.store_lse(first_row + row, sum == 0.0f ? -INFINITY : maximum + logf(sum));
      }
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
      Float4 o{};
#pragma unroll 1
      for (int first = 0; first < count_; first += kPartsInFlight) {
#pragma unroll
        for (int k = 0; k < kPartsInFlight; ++k) {
          if (first + k >= count_) continue;
          const float weight = weights_[(first + k) * rows + row];
#pragma unroll
          for (int c = 0; c < 4; ++c) {
            o.value[c] = fmaf(weight, chunk.states[k].value[c], o.value[c]);
          }
        }
        const int next = first + kPartsInFlight;
        const bool ends = next >= count_;  // the next chunk is the first of the thread's next item
        load_chunk(chunk, first_row, rows, ends ? i + kThreads : i, ends ? 0 : next);
      }
      sink.store(first_row + row, column, o);
    }
  }

  StepParts parts_;
  int count_, head_dim_;
  float* weights_;  // [count, rows]
};

// Merges the parts of a step, by all threads of one block.
template <int kThreads, typename Sync = SyncBlock, typename Sink>
__device__ void merge_step(const PartialStates& states, const Contributors& workers,
                           const MergeStep& step, int num_rows, char* scratch, const Sink& sink) {
  // A result that is no output takes the place of the step's first part.
  const StateSink<Sink> result{sink, states.sink(partial_slot(workers, step.first)),
                               step.completes_output};
  PartsMerger<kThreads, Sync>(states, workers, step, scratch).run(num_rows, result);
}

// Counts this block's arrival at a counter of the workspace and returns whether it is the last of
// `expected`. To be called by all threads; `flag` is shared memory for nothing else: threads may
// read it until they meet the first barrier of the next call.
//
// A barrier orders the block's threads before and after thread 0, and its atomic orders them before
// and after the other blocks' (PTX ISA, 8.9.5: causality order is transitive), so that plain loads
// and stores of partial states need no fences of their own. A cluster's barrier does that for what
// its other blocks have stored.
template <typename Sync = SyncBlock>
__device__ __forceinline__ bool arrive(uint32_t* counter, int64_t expected, bool* flag) {
  const uint32_t limit = static_cast<uint32_t>(expected) - 1;
  Sync::sync();
  if (threadIdx.x == 0) *flag = atomic_inc_acq_rel(counter, limit) == limit;
  // Without this: threads do not wait to hear whether they are last.
  Sync::sync();
  return *flag;
}

// Called by all threads of a block after they, or the blocks of its cluster, have stored partial
// state `part` of an output that workers share: whichever block is last to arrive stores the output
// to `sink`. All threads must be done with `scratch` before, and may use it after.
template <int kThreads, typename Sync = SyncBlock, typename Sink>
__device__ void complete_output(uint32_t* counters, const PartialStates& states,
                                const Contributors& workers, int64_t part, int num_rows,
                                char* scratch, const Sink& sink) {
  fix_up(
      workers, part,
      [&](int64_t counter, int64_t expected) {
        return arrive<Sync>(counters + counter, expected,
                            reinterpret_cast<bool*>(scratch + kArrivalFlag));
      },
      [&](const MergeStep& step) {
        merge_step<kThreads, Sync>(states, workers, step, num_rows, scratch, sink);
      },
      max_merged_parts(num_rows));
}

}  // namespace tree_attention::cuda
