// SPDX-License-Identifier: BSD-3-Clause
//
// The exchange of all ranks' states in one kernel, for ranks that reach one another's memory: every
// rank stores its state into every rank's buffer, raises flags, waits for the flags of the others,
// and merges what it was given. It works so:
//
// A rank's buffer holds flags [parity][block][source rank] and slots [parity][source rank], and is
// written by all ranks. Block b of a rank sends and merges a slice of the rows and waits for block
// b of every other rank, whose grids are equal: no barrier across a grid, and at most
// kOneShotMaxBlocks blocks, which a device runs side by side.
//
// Calls are counted by an epoch in device memory, so that a captured graph may be replayed. Flags
// carry the epoch. The flags and slots of epoch k are used again in epoch k + 2, without another
// flag. For a rank stores in epoch k + 2 only after its kernel of epoch k + 1 has ended. In that
// kernel it saw every rank's flag of epoch k + 1, and each rank raised that flag after its kernel
// of epoch k had ended, with all of its reading. So launches of a rank must be ordered, by a stream
// or by events.
//
// A rank that waits for longer than the timeout, or is aborted, gives NaN for the block's rows,
// says in host memory which rank it waited for, and from its next launch on sends nothing and gives
// NaN: no rank can get more than one epoch ahead of it, into slots that it may be reading. Ranks
// that take part with other sizes, or out of step, are found by their flags in the same way.
#pragma once

#include <cuda_runtime_api.h>

#include "common/dtype.h"

namespace tree_attention::cuda {

constexpr int kOneShotMaxRanks = 16;
constexpr int kOneShotMaxBlocks = 32;
constexpr int kOneShotAlignment = 16;  // bytes, of rows of o, of slots and of buffers
constexpr int64_t kOneShotFlags = 2 * kOneShotMaxBlocks * kOneShotMaxRanks;

// Size in bytes of a rank's buffer, which begins as zeros.
constexpr int64_t one_shot_buffer_bytes(int64_t world_size, int64_t slot_bytes) {
  return kOneShotFlags * sizeof(uint64_t) + 2 * world_size * slot_bytes;
}

// What a rank keeps from launch to launch, in its device memory. It begins as zeros.
struct OneShotControl {
  uint32_t epoch;    // number of the last launch
  uint32_t arrived;  // blocks of this launch that have ended
  uint32_t failing;  // blocks that gave up, in this launch and all before
  uint32_t failed;   // blocks that gave up in earlier launches
};

enum class OneShotError : uint64_t { kNone, kMissing, kDiffers, kAborted };

// What host and device tell each other, in host memory.
struct OneShotHost {
  uint64_t timeout;  // nanoseconds
  uint64_t aborted;
  OneShotError error[kOneShotMaxRanks];  // why the wait for each rank ended
};

struct OneShotParams {
  const void* o;           // [num_rows, head_dim] contiguous
  const float* lse;        // [num_rows]
  void* out_o;             // [num_rows, head_dim] contiguous
  float* out_lse;          // [num_rows]
  const int64_t* buffers;  // [world_size]: their addresses on this device
  OneShotControl* control;
  OneShotHost* host;
  int64_t slot_bytes;
  int64_t num_rows;
  int32_t head_dim;
  int32_t rank, world_size;
  DataType dtype;      // of o: float32 or bfloat16
  DataType out_dtype;  // of out_o
};

// Size in bytes of a state in a slot.
constexpr int64_t one_shot_state_bytes(int64_t num_rows, int64_t row_bytes) {
  return num_rows * row_bytes + (num_rows * int64_t{sizeof(float)} + kOneShotAlignment - 1) /
                                    kOneShotAlignment * kOneShotAlignment;
}

cudaError_t launch_one_shot(const OneShotParams& params, cudaStream_t stream);

}  // namespace tree_attention::cuda
