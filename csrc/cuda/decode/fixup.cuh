// SPDX-License-Identifier: BSD-3-Clause
//
// The fix-up of ../common/fixup.h among thread blocks: partial states in global memory, and the
// merge by the block that arrives last.
#pragma once

#include "common/fixup.h"
#include "cuda/element.cuh"
#include "cuda/merge/merge_tree.cuh"
#include "tile_config.cuh"

namespace tree_attention::cuda {

// Partial states by slot: o [rows, head_dim] and lse [rows] each. Rows that an output does not have
// are neither written nor read.
class PartialStates {
 public:
  // `rows` is a multiple of 4, so that every slot is aligned to 16 bytes.
  __device__ PartialStates(float* memory, int rows, int head_dim)
      : memory_(memory), rows_(rows), head_dim_(head_dim) {}

  __device__ int head_dim() const { return head_dim_; }
  __device__ float* o(int64_t slot) const { return memory_ + slot * rows_ * (head_dim_ + 1); }
  __device__ float* lse(int64_t slot) const { return o(slot) + rows_ * head_dim_; }

  // Stores into a slot as OutputSink stores into the caller's tensors.
  struct Sink {
    float *o, *lse_of_row;
    int head_dim;

    __device__ void store(int row, int column, const Float4& values) const {
      store_float4(o + row * head_dim + column, values);
    }
    __device__ void store_lse(int row, float lse) const { lse_of_row[row] = lse; }
  };
  __device__ Sink sink(int64_t slot) const { return {o(slot), lse(slot), head_dim_}; }

 private:
  float* memory_;
  int rows_, head_dim_;
};

// One block's merge of parts of an output, into `sink` or the slot of the first.
template <int kThreads>
class PartsMerger {
 public:
  __device__ PartsMerger(const PartialStates& states, const Contributors& workers,
                         const MergeStep& step, char* scratch)
      : first_(states.o(partial_slot(workers, step.first))),
        others_(states.o(partial_slot(workers.first + step.first, false))),
        stride_(states.o(partial_slot(step.stride, false)) - states.o(0)),
        lse_offset_(static_cast<int>(states.lse(0) - states.o(0))),
        head_dim_(states.head_dim()),
        count_(static_cast<int>(step.count)),
        completes_output_(step.completes_output),
        nodes_(reinterpret_cast<Node*>(scratch)) {}

  // Called by all threads. As many rows at a time as the scratch memory has room for.
  template <typename Sink>
  __device__ void run(int num_rows, const Sink& sink) const {
    const int rows_per_pass = kFixupScratchBytes / (count_ * static_cast<int>(sizeof(Node)));
    for (int first_row = 0; first_row < num_rows; first_row += rows_per_pass) {
      const int left = num_rows - first_row;
      const int rows = left < rows_per_pass ? left : rows_per_pass;
      merge_lse(first_row, rows);
      merge_o(first_row, rows, sink);
      __syncthreads();  // before the nodes are written again
    }
  }

 private:
  // Of a row's tree: in the place of part i, at first the part's lse; then the weights of the merge
  // whose upper side begins with part i. Part 0 is no upper side and ends as the merged lse.
  struct Node {
    float weight_a, weight_b;  // below zero: this side is left out
    __device__ float& lse() { return weight_a; }
  };
  static_assert(kMaxMergedParts * sizeof(Node) <= kFixupScratchBytes);

  __device__ const float* part(int i) const { return i == 0 ? first_ : others_ + i * stride_; }

  // The tree of each row, level by level, all nodes of a level side by side.
  __device__ void merge_lse(int first_row, int rows) const {
    for (int i = threadIdx.x; i < rows * count_; i += kThreads) {
      const int row = i % rows;
      nodes_[row * count_ + i / rows].lse() = part(i / rows)[lse_offset_ + first_row + row];
    }
    __syncthreads();
    for (int step = 1; step < count_; step *= 2) {
      const int pairs = (count_ - step - 1) / (2 * step) + 1;  // of a row
      for (int i = threadIdx.x; i < rows * pairs; i += kThreads) {
        Node* a = nodes_ + i / pairs * count_ + i % pairs * 2 * step;
        Node* b = a + step;
        const Merge merged = merge(a->lse(), b->lse());
        a->lse() = merged.lse;
        const bool takes_a = merged.take == Merge::Take::kBoth || merged.take == Merge::Take::kA;
        const bool takes_b = merged.take == Merge::Take::kBoth || merged.take == Merge::Take::kB;
        *b = {takes_a ? merged.weight_a : -1.0f, takes_b ? merged.weight_b : -1.0f};
      }
      __syncthreads();
    }
  }

  static constexpr int kLevels = 3;
  static_assert(kMaxMergedParts < kPartsInFlight << kLevels);

  // Each thread owns four columns of some rows.
  template <typename Sink>
  __device__ void merge_o(int first_row, int rows, const Sink& sink) const {
    const int columns = head_dim_ / 4;
    for (int i = threadIdx.x; i < rows * columns; i += kThreads) {
      const int row = i / columns, column = i % columns * 4;
      Node* nodes = nodes_ + row * count_;
      const int offset = (first_row + row) * head_dim_ + column;
      const auto load = [&](int i) { return load_float4(part(i) + offset); };
      const auto merge_into = [&](Float4& a, const Float4& b, int i) {
        const Merge merged = merge_at(nodes, i);
#pragma unroll
        for (int c = 0; c < 4; ++c) a.value[c] = merged(a.value[c], b.value[c]);
      };
      const Float4 o = merge_parts<kLevels>(count_, load, merge_into);
      if (completes_output_) {
        sink.store(first_row + row, column, o);
        if (column == 0) sink.store_lse(first_row + row, nodes[0].lse());
      } else {
        store_float4(first_ + offset, o);
        if (column == 0) first_[lse_offset_ + first_row + row] = nodes[0].lse();
      }
    }
  }

  __device__ Merge merge_at(const Node* nodes, int i) const {
    const Node node = nodes[i < count_ ? i : count_ - 1];
    const bool takes_a = i >= count_ || !(node.weight_a < 0.0f);  // NaN is taken
    const bool takes_b = i < count_ && !(node.weight_b < 0.0f);
    const Merge::Take take = takes_a ? (takes_b ? Merge::Take::kBoth : Merge::Take::kA)
                                     : (takes_b ? Merge::Take::kB : Merge::Take::kNone);
    return {take, node.weight_a, node.weight_b, 0.0f};
  }

  // The output's first part has the other slot of its worker; from part to part it is a stride.
  float *first_, *others_;
  int64_t stride_;
  int lse_offset_, head_dim_, count_;
  bool completes_output_;
  Node* nodes_;
};

// Called by all threads of a block after they have stored its partial state of an output that it
// shares: whichever block is last to arrive stores the output to `sink`. All threads must be done
// with `scratch` before, and may use it after.
template <int kThreads, typename Sink>
__device__ void complete_output(uint32_t* counters, const PartialStates& states,
                                const Contributors& workers, int num_rows, char* scratch,
                                const Sink& sink) {
  // A barrier orders the block's threads before and after thread 0, and its atomic orders them
  // before and after the other blocks' (PTX ISA, 8.9.5: causality order is transitive), so that
  // plain loads and stores of partial states need no fences of their own.
  const auto arrive = [&](int64_t counter, int64_t expected) {
    bool* is_last = reinterpret_cast<bool*>(scratch);
    const uint32_t limit = static_cast<uint32_t>(expected) - 1;
    __syncthreads();
    if (threadIdx.x == 0) *is_last = atomic_inc_acq_rel(counters + counter, limit) == limit;
    __syncthreads();
    const bool result = *is_last;
    __syncthreads();  // before the scratch memory is written again
    return result;
  };
  fix_up(workers, blockIdx.x - workers.first, arrive, [&](const MergeStep& step) {
    PartsMerger<kThreads>(states, workers, step, scratch).run(num_rows, sink);
  });
}

}  // namespace tree_attention::cuda
