// SPDX-License-Identifier: BSD-3-Clause
//
// From a checked call to a kernel. Everything the host decides, it decides from shapes: never from
// lengths, which are device data and may change between replays of a CUDA graph.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/decode_params.h"
#include "divisor.h"

namespace tree_attention::cuda {

// The fields of cudaDeviceProp that a plan depends on.
struct DeviceLimits {
  int32_t num_sms;
  int32_t shared_bytes_per_sm;
  int32_t shared_bytes_per_block;  // the most that one block may ask for
  // Whether a kernel may begin while the one ahead of it ends (compute capability 9.0).
  bool has_early_launches = false;
  // Whether blocks may form clusters: the same, and by find_ptx_version.
  bool has_clusters = false;
  // Whether the kernel for Hopper is built, and this is one (wgmma_config.cuh).
  bool has_wgmma = false;
};

// Scratch memory of one launch. Launches that may run at the same time need one workspace each.
struct Workspace {
  uint32_t* counters;  // zero before the launch, and after it
  float* partials;     // states of outputs that blocks share
};

struct WorkspaceSize {
  int64_t num_counters, num_partial_floats;
};

struct Plan {
  int32_t row_tile;          // packed rows of an output
  int32_t tile_keys;         // keys of a tile
  int32_t num_threads;       // threads of a block
  int32_t blocks_per_sm;     // blocks that are resident on a multiprocessor
  int32_t num_stages;        // stages of the ring, at least two
  int32_t shared_bytes;      // dynamic shared memory of a block
  int32_t cluster_size = 1;  // blocks of a worker: 1, 2, 4 or 8
  int32_t num_workers;       // clusters of the grid
  bool launches_early;
  bool uses_wgmma = false;
  WorkspaceSize workspace;
};

// The line of schedule.cuh where every output has all keys, so that the host knows it.
struct UniformLine {
  int32_t output_length;        // positions of an output; 0 where the device has to find the keys
  int32_t quotient, remainder;  // of the line's length by the workers
  Divisor workers;              // number of workers that have work
  Divisor output;               // output_length
  Divisor heads;                // kv heads
};

// The only argument of the kernel.
struct LaunchParams {
  DecodeParams decode;
  Workspace workspace;
  Divisor group_size;  // query heads of a kv head
  Divisor batch;       // decode.batch
  Divisor key_block;   // key_layout.block
  Divisor page_size;   // slots of a page; not used without pages
  int32_t num_stages;
  int32_t cluster_bits;  // logarithm of Plan::cluster_size
  int32_t row_blocks;    // outputs of each (batch, kv head)
  UniformLine line;
};

Plan plan_lean_decode(const DecodeParams& params, const DeviceLimits& limits);

// Ten times the compute capability that the kernels' code was written for which the current device
// runs. It may be older than the device: the driver compiles PTX for devices that came later.
cudaError_t find_ptx_version(int* version);

// The size of a workspace that is enough for every plan on the device, unless num_workers asks for
// more blocks than are resident.
WorkspaceSize largest_workspace(const DeviceLimits& limits);

cudaError_t launch_lean_decode(const DecodeParams& params, const Plan& plan,
                               const Workspace& workspace, cudaStream_t stream);

// How many blocks of the plan's kernel are resident on a multiprocessor, by the driver, which knows
// registers and what the system takes.
cudaError_t find_resident_blocks(const DecodeParams& params, const Plan& plan, int* blocks);

LaunchParams launch_params(const DecodeParams& params, const Plan& plan,
                           const Workspace& workspace);

// Launches the kernel for the element types of queries and of keys and values, a head_dim bucket
// and the plan's row tile. It is defined in lean_decode.cuh and instantiated once in each file that
// instances.py writes.
template <typename Element, int kHeadDim, typename Cached>
cudaError_t launch_instance(const LaunchParams& params, const Plan& plan, cudaStream_t stream);

// The number of blocks of that kernel that a multiprocessor holds at once.
template <typename Element, int kHeadDim, typename Cached>
cudaError_t find_resident_blocks_of_instance(const Plan& plan, int* blocks);

}  // namespace tree_attention::cuda
