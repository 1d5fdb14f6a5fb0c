// SPDX-License-Identifier: BSD-3-Clause
//
// What stamped_kernel writes.
#pragma once

#include <cstdint>

namespace tree_attention::ablations {

// In the order in which a block passes them; benchmarks/cuda/stamps.py has their names. Those of an
// output are there for each of the first kStampedOutputs of which the block has tiles.
enum Place { kStart, kWaited, kCut, kFirstOutput };
enum PlaceOfOutput {
  kBegun,      // the output's rows are known
  kRequested,  // so are copies into all stages of the ring
  kArrived,    // the first keys are there
  kLooped,     // the last product of this warp is made
  kCombined,   // the block's state of the output is stored
  kCounted,    // and counted, after a fence
  kMerged,     // this block was the last to arrive and has merged the parts
  kCountedAbove,
  kMergedAbove,  // the same of the second level
  kPlacesOfOutput
};
constexpr int kStampedOutputs = 2;
constexpr int kEnd = kFirstOutput + kStampedOutputs * kPlacesOfOutput;

struct Stamp {
  uint64_t cycles, nanoseconds;  // zero where the block does not come
};

struct BlockStamps {
  Stamp places[kEnd + 1];
};

}  // namespace tree_attention::ablations
