// SPDX-License-Identifier: BSD-3-Clause
//
// What the host decides of a launch.
#include <algorithm>
#include <bit>

#include "cluster.cuh"
#include "common/fixup.h"
#include "cuda/device.h"
#include "instances.cuh"
#include "launch.h"
#include "schedule.cuh"
#include "wgmma_config.cuh"

namespace tree_attention::cuda {
namespace {

__global__ void do_nothing(int) {}

// Bytes of shared memory that the system takes for each block, in addition to what it asks for.
constexpr int kSystemSharedBytes = 1024;

// One tile is under way while another one is worked on.
constexpr int kMinStages = 2, kMaxStages = 4;
// Its barriers have room for as many.
static_assert(WgmmaConfig<BFloat16, 576, 16>::kMaxStages == kMaxStages);

// Only a caller's num_workers reaches this bound, at which the partial states of the largest tiles
// take 2 GB.
constexpr int64_t kMaxWorkers = 1 << 14;

int64_t num_rows(const DecodeParams& p) { return int64_t{p.group_size()} * p.seqlen_q; }

int head_dim(const DecodeParams& p) { return std::max(p.head_dim, p.head_dim_v); }

int64_t num_row_blocks(const DecodeParams& p, int row_tile) {
  return (num_rows(p) + row_tile - 1) / row_tile;
}

// Two blocks on a multiprocessor hide each other's barriers and fix-ups, if each has a ring of two
// stages or more.
template <typename Config>
void plan_occupancy(Plan& plan, const DeviceLimits& limits) {
  const int half =
      std::min(limits.shared_bytes_per_sm / 2 - kSystemSharedBytes, limits.shared_bytes_per_block);
  const auto num_stages = [](int shared_bytes, int most) {
    return std::clamp((shared_bytes - Config::shared_bytes(0)) / Config::kStageBytes, kMinStages,
                      most);
  };
  const bool two = Config::kMaxBlocks == 2 && Config::shared_bytes(2) <= half;
  plan.num_threads = Config::kThreads;
  plan.blocks_per_sm = two ? 2 : 1;
  plan.num_stages =
      two ? num_stages(half, 3) : num_stages(limits.shared_bytes_per_block, kMaxStages);
  plan.shared_bytes = Config::shared_bytes(plan.num_stages);
  plan.launches_early = limits.has_early_launches;
}

template <typename Config>
int64_t num_outputs(const DecodeParams& p) {
  return int64_t{p.batch} * p.num_heads_kv * num_row_blocks(p, Config::kRows);
}

// The most workers that can have work. More of them would change no result.
template <typename Config>
int64_t max_workers(const DecodeParams& p) {
  const int64_t num_tiles = (p.seqlen_k + Config::kTileKeys - 1) / Config::kTileKeys;
  const int64_t line = std::min(num_outputs<Config>(p), kMaxWorkers) * (kOverheadTiles + num_tiles);
  const int64_t workers = p.num_workers > 0 ? line : (line + kMinWorkerTiles - 1) / kMinWorkerTiles;
  return std::clamp<int64_t>(workers, 1, kMaxWorkers);
}

// Where all row blocks have the same keys, as many workers for each of them walk these side by
// side, and the L2 has what one of them read for the others (schedule.cuh). It may cost a
// sixteenth of the workers at most, because tiles of many rows take long with their products, too.
int64_t in_step(int64_t workers, int64_t row_blocks) {
  const int64_t rest = workers % std::max<int64_t>(row_blocks, 1);  // there may be no queries
  return 16 * rest <= workers ? workers - rest : workers;
}

// As many workers as leave no output more parts than two levels of merges take: a third one, which
// only one output for all multiprocessors needs, costs more than the rest of the workers gain.
template <typename Config>
int64_t most_in_two_levels(const DecodeParams& p) {
  const int64_t parts = kRadix * max_merged_parts(std::min<int64_t>(num_rows(p), Config::kRows));
  return std::max<int64_t>(1, num_outputs<Config>(p)) * parts;
}

// How many of the resident blocks clusters of eight can take at least. A cluster lies within one of
// the device's processing clusters, of which a Hopper's have 16 or 18 multiprocessors.
int64_t in_eights(int64_t resident) { return resident - resident / 9; }

// An output may be left whole to one cluster, though that uses fewer blocks, where each of them has
// so few tiles.
constexpr int64_t kMostWholeTiles = 4;

// Workers, and the blocks of each, where `blocks` have work and `resident` are resident. Clusters
// are for outputs that one of them has alone, so that no part of them goes through global memory,
// and for outputs of more parts than are merged at once. In between they would cost as much as they
// save (benchmarks/cuda/predict.py).
template <typename Config>
void plan_workers(Plan& plan, const DecodeParams& p, const DeviceLimits& limits, int64_t blocks,
                  int64_t resident) {
  plan.cluster_size = 1;
  plan.num_workers = static_cast<int32_t>(blocks);
  const int64_t outputs = num_outputs<Config>(p);
  // A caller's workers are single blocks.
  if (!limits.has_clusters || !kFormsClusters<Config> || p.num_workers > 0 || outputs == 0) return;
  const int64_t of_output = blocks / outputs;
  if (of_output < 2) return;
  constexpr int32_t kMost = 1 << kMaxClusterBits;
  if (of_output > max_merged_parts(std::min<int64_t>(num_rows(p), Config::kRows))) {
    plan.cluster_size = kMost;
    plan.num_workers = static_cast<int32_t>(std::min(blocks, in_eights(resident)) / kMost);
    return;
  }
  const auto size = static_cast<int32_t>(std::bit_floor(static_cast<uint64_t>(of_output)));
  const int32_t cluster_size = std::min(kMost, size);
  const int64_t tiles = (p.seqlen_k + Config::kTileKeys - 1) / Config::kTileKeys;
  const bool is_short = (tiles + cluster_size - 1) / cluster_size <= kMostWholeTiles;
  const int64_t used = cluster_size * outputs;
  if (cluster_size == kMost && used > in_eights(resident)) return;
  if (8 * used < 7 * blocks && !is_short) return;
  plan.cluster_size = cluster_size;
  plan.num_workers = static_cast<int32_t>(outputs);
}

// Only axes of one element have strides that are no multiples of a copy (checks.cpp). Copies of
// rows that do not exist form addresses with them, which have to be aligned.
void drop_unaligned(int64_t (&strides)[3], int element_size) {
  for (int64_t& stride : strides) {
    if (stride * element_size % 16 != 0) stride = 0;
  }
}

template <typename Config>
WorkspaceSize workspace_size(int64_t num_workers) {
  const int64_t slots = num_partial_slots(num_workers);
  return {slots, slots * Config::kRows * (Config::kValueColumns + 1)};
}

template <typename Config>
Plan plan_config(const DecodeParams& p, const DeviceLimits& limits) {
  Plan plan;
  plan.uses_wgmma = Config::kUsesWgmma;
  plan.row_tile = Config::kRows;
  plan.tile_keys = Config::kTileKeys;
  plan_occupancy<Config>(plan, limits);
  const int64_t resident = int64_t{plan.blocks_per_sm} * limits.num_sms;
  const int64_t workers = p.num_workers > 0
                              ? p.num_workers
                              : std::min(most_in_two_levels<Config>(p),
                                         in_step(resident, num_row_blocks(p, Config::kRows)));
  plan_workers<Config>(plan, p, limits, std::min(workers, max_workers<Config>(p)), resident);
  plan.workspace = workspace_size<Config>(plan.num_workers);
  return plan;
}

}  // namespace

cudaError_t find_ptx_version(int* version) { return find_ptx_version(do_nothing, version); }

Plan plan_lean_decode(const DecodeParams& p, const DeviceLimits& limits) {
  if (limits.has_wgmma && takes_wgmma(p)) {
    return with_wgmma_instance(p, [&]<typename Element, int kHeadDim>() {
      return with_wgmma_rows<Element, kHeadDim>(
          num_rows(p), [&]<typename Config>() { return plan_config<Config>(p, limits); });
    });
  }
  return with_instance(
      p.dtype, p.kv_dtype, head_dim(p), [&]<typename Element, int kHeadDim, typename Cached>() {
        const auto plan_rows = [&](int64_t num_rows) {
          return with_row_tile<Element, kHeadDim, Cached>(
              num_rows, [&]<typename Config>() { return plan_config<Config>(p, limits); });
        };
        Plan plan = plan_rows(num_rows(p));
        // The queries of many rows may leave too little shared memory for the ring.
        for (int rows = plan.row_tile / 2;
             rows >= 16 && plan.shared_bytes > limits.shared_bytes_per_block; rows /= 2) {
          plan = plan_rows(rows);
        }
        return plan;
      });
}

// Kernels for keys of 8 bits have the rows, columns and blocks of some kernel of 16, or fewer. The
// states of latents take twice as much: who attends to these gets another workspace, once.
WorkspaceSize largest_workspace(const DeviceLimits& limits) {
  WorkspaceSize largest{0, 0};
  for (const DataType dtype : {DataType::kFloat32, DataType::kBFloat16, DataType::kFloat16}) {
    for (const int dim : {64, 128, 256}) {
      with_instance(dtype, dtype, dim, [&]<typename Element, int kHeadDim, typename Cached>() {
        for (const int64_t rows : {16, 32, 64, 128}) {
          with_row_tile<Element, kHeadDim, Cached>(rows, [&]<typename Config>() {
            Plan plan;
            plan_occupancy<Config>(plan, limits);
            const WorkspaceSize size =
                workspace_size<Config>(int64_t{plan.blocks_per_sm} * limits.num_sms);
            largest.num_counters = std::max(largest.num_counters, size.num_counters);
            largest.num_partial_floats =
                std::max(largest.num_partial_floats, size.num_partial_floats);
          });
        }
      });
    }
  }
  return largest;
}

UniformLine uniform_line(const DecodeParams& p, const Plan& plan) {
  UniformLine line{};
  const int64_t output_length = kOverheadTiles + (p.seqlen_k + plan.tile_keys - 1) / plan.tile_keys;
  const int64_t outputs = int64_t{p.batch} * p.num_heads_kv * num_row_blocks(p, plan.row_tile);
  if (p.key_ranges != nullptr || outputs == 0 || output_length > INT32_MAX / outputs) return line;
  const int64_t length = outputs * output_length;
  const int cluster_bits = std::countr_zero(static_cast<uint32_t>(plan.cluster_size));
  const int64_t workers =
      partition_of_line(length, outputs, p.num_workers, plan.num_workers, cluster_bits).num_workers;
  line.output_length = static_cast<int32_t>(output_length);
  line.quotient = static_cast<int32_t>(length / workers);
  line.remainder = static_cast<int32_t>(length % workers);
  line.workers = Divisor::of(static_cast<uint32_t>(workers));
  line.output = Divisor::of(static_cast<uint32_t>(output_length));
  line.heads = Divisor::of(static_cast<uint32_t>(p.num_heads_kv));
  return line;
}

LaunchParams launch_params(const DecodeParams& p, const Plan& plan, const Workspace& workspace) {
  LaunchParams params;
  params.decode = p;
  drop_unaligned(params.decode.q_stride, element_size(p.dtype));
  drop_unaligned(params.decode.k_stride, element_size(p.kv_dtype));
  drop_unaligned(params.decode.v_stride, element_size(p.kv_dtype));
  params.workspace = workspace;
  params.group_size = Divisor::of(p.group_size());
  params.batch = Divisor::of(p.batch);
  // Keys are below 2^31, so that a larger block has them all, as one of INT32_MAX has.
  params.key_block = Divisor::of(std::min<int64_t>(p.key_layout.block, INT32_MAX));
  params.page_size = Divisor::of(p.page_table == nullptr ? 1 : p.page_size);
  params.num_stages = plan.num_stages;
  params.cluster_bits = std::countr_zero(static_cast<uint32_t>(plan.cluster_size));
  params.row_blocks = static_cast<int32_t>(num_row_blocks(p, plan.row_tile));
  params.line = uniform_line(p, plan);
  return params;
}

}  // namespace tree_attention::cuda
