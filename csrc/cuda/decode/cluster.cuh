// SPDX-License-Identifier: BSD-3-Clause
//
// A worker of several blocks: a cluster, which runs side by side on neighbouring multiprocessors.
// The blocks take the worker's tiles in turn and merge their states of an output through each
// other's shared memory, so that an output has as many parts in global memory as it has clusters,
// or none.
#pragma once

#include "combine_warps.cuh"
#include "fixup.cuh"
#include "schedule.cuh"

namespace tree_attention::cuda {

// What the other blocks of a cluster read of a block's state, apart from o.
template <typename Config>
struct ClusterState {
  float lse[Config::kRows];
  float stage;  // where in shared memory o's stage begins, a whole number; -1: there is no state
};

// Keeps a block's state in its own shared memory. What combine_warps has read of a place by then,
// the same thread has read.
template <typename Config>
struct ClusterSink {
  GroupOutputs<Config> outputs;
  ClusterState<Config>& state;

  __device__ void store(int row, int column, const Float4& o) const {
    store_shared(outputs.at(0, row, column), o);
  }
  __device__ void store_lse(int row, float lse) const { state.lse[row] = lse; }
};

// A block's state of an output goes to the cluster, or where `Sink` says.
template <typename Config, typename Sink>
struct BlockSink {
  const Sink& sink;
  const ClusterSink<Config>& of_cluster;
  bool in_cluster;

  __device__ void store(int row, int column, const Float4& o) const {
    if (in_cluster) {
      of_cluster.store(row, column, o);
    } else {
      sink.store(row, column, o);
    }
  }
  __device__ void store_lse(int row, float lse) const {
    if (in_cluster) {
      of_cluster.store_lse(row, lse);
    } else {
      sink.store_lse(row, lse);
    }
  }
};

// Where a block's state is told to its cluster.
template <typename Config>
__device__ ClusterState<Config>& cluster_state(char* shared) {
  static_assert(sizeof(ClusterState<Config>) <= kArrivalFlag);
  return *reinterpret_cast<ClusterState<Config>*>(shared + Config::kScratch);
}

// Stores a block's state of an output, which is its worker's or a part of it. To be called by all
// threads; `stage` is a free stage of the ring.
template <typename Config, typename Tile, typename Sink>
__device__ void store_state(const LaunchParams& params, const Tile& tile,
                            const OnlineSoftmax<Config>& softmax, const OutputRows& rows,
                            char* shared, char* stage, const Sink& sink) {
  const int head_dim_v = params.decode.head_dim_v;
  if constexpr (kFormsClusters<Config>) {
    static_assert(GroupOutputs<Config>::kColumns == Config::kValueColumns);
    ClusterState<Config>& state = cluster_state<Config>(shared);
    const ClusterSink<Config> of_cluster{GroupOutputs<Config>(stage), state};
    combine_warps<Config>(tile, softmax, rows, head_dim_v, shared, stage,
                          BlockSink{sink, of_cluster, params.cluster_bits > 0});
    if (threadIdx.x == 0) state.stage = static_cast<float>(stage - shared);
  } else {
    combine_warps<Config>(tile, softmax, rows, head_dim_v, shared, stage, sink);
  }
}

// The same of a block of a cluster that has no tiles of the output.
template <typename Config>
__device__ void store_no_state(char* shared) {
  if (threadIdx.x == 0) cluster_state<Config>(shared).stage = -1.0f;
}

// Merges the states of a cluster's blocks into `sink`, each block a run of the output's elements.
// To be called by all threads of the cluster. `own_stage` holds the block's own state.
// Afterwards stages may be filled, blocks end, and one block release to the device what all of them
// have stored. Sums are in the order of the blocks.
template <typename Config, typename Sink>
__device__ void merge_states_of_cluster(const LaunchParams& params, const OutputRows& rows,
                                        char* shared, char* own_stage, const Sink& sink) {
  constexpr int kMost = 1 << kMaxClusterBits, kInFlight = 4;
  const ClusterState<Config>& state = cluster_state<Config>(shared);
  const int blocks = cluster_size<Config>(params), rank = rank_in_cluster<Config>(params);
  const int columns = params.decode.head_dim_v / 4, items = rows.count * columns;
  const int items_of_block = (items + blocks - 1) >> params.cluster_bits;
  const int end = min(items, (rank + 1) * items_of_block);
  // Without this: states are merged before all blocks of the cluster have stored them.
  barrier_cluster();
#pragma unroll 1
  for (int i = rank * items_of_block + threadIdx.x; i < end; i += Config::kThreads) {
    const int row = i / columns, column = i % columns * 4;
    const float* const own = GroupOutputs<Config>(own_stage).at(0, row, column);
    const uint32_t of_lse = shared_address(&state.lse[row]) - shared_address(shared);
    const uint32_t of_stage = shared_address(&state.stage) - shared_address(shared);
    const uint32_t in_stage = shared_address(own) - shared_address(own_stage);
    uint32_t memory[kMost];
    float weights[kMost], stages[kMost], maximum = kNoMaximum;
#pragma unroll
    for (int block = 0; block < kMost; ++block) {
      memory[block] = mapa(shared_address(shared), min(block, blocks - 1));
      weights[block] = ld_shared_cluster(memory[block] + of_lse);
      stages[block] = ld_shared_cluster(memory[block] + of_stage);
    }
#pragma unroll
    for (int block = 0; block < kMost; ++block) {
      if (block >= blocks) stages[block] = -1.0f;
      if (stages[block] < 0.0f) weights[block] = -INFINITY;
      maximum = fmaxf(maximum, weights[block]);
    }
    float sum = 0.0f;
#pragma unroll
    for (int block = 0; block < kMost; ++block) {
      weights[block] = ex2((weights[block] - maximum) * kLog2E);
      sum += weights[block];
    }
    Float4 o{};
#pragma unroll
    for (int first = 0; first < kMost; first += kInFlight) {
      Float4 parts[kInFlight];
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        parts[i] = Float4{};
        const int stage = static_cast<int>(stages[first + i]);
        if (stage >= 0) ld_shared_cluster_v4(parts[i].value, memory[first + i] + stage + in_stage);
      }
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          o.value[c] = fmaf(weights[first + i], parts[i].value[c], o.value[c]);
        }
      }
    }
    const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;  // zero: no block has a key
#pragma unroll
    for (int c = 0; c < 4; ++c) o.value[c] *= inverse;
    sink.store(row, column, o);
    if (column == 0) sink.store_lse(row, sum == 0.0f ? -INFINITY : maximum + logf(sum));
  }
  // Without this: a stage is filled, or its block ends, while another block reads it.
  barrier_cluster();
}

// Merges the states of a cluster's blocks into one, if there are several blocks. Returns whether
// there is nothing else to do for this block, because its worker has the whole output, or because
// another block of the cluster goes on. To be called by all threads of the cluster after
// store_state.
template <typename Config, typename Sink>
__device__ bool merge_cluster(const LaunchParams& params, const OutputRows& rows, char* shared,
                              char* own_stage, const StateSink<Sink>& sink) {
  if constexpr (kFormsClusters<Config>) {
    if (params.cluster_bits > 0) {
      merge_states_of_cluster<Config>(params, rows, shared, own_stage, sink);
      return sink.is_output || rank_in_cluster<Config>(params) > 0;
    }
  }
  // Without this: a stage is filled while o is read from it.
  if (sink.is_output) __syncthreads();
  return sink.is_output;
}

}  // namespace tree_attention::cuda
