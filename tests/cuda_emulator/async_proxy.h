// SPDX-License-Identifier: BSD-3-Clause
//
// The state of a block that only compute capability 9.0 has: barriers in shared memory, copies that
// arrive at some later time, and a second image of shared memory, from which products read.
#pragma once

#include <cstdint>
#include <map>
#include <source_location>
#include <vector>

#include "sanitizers.h"

namespace tree_attention::emulator {

struct Block;
struct Thread;

// An mbarrier. Phase n ends when all arrivals and bytes have come.
struct Barrier {
  explicit Barrier(uint32_t count, const Thread* initialiser)
      : count(count), pending(count), initialiser(initialiser) {}

  uint32_t count;    // arrivals that end a phase
  uint32_t pending;  // arrivals that the current phase still waits for
  int64_t bytes = 0;
  int64_t phase = 0;
  const Thread* initialiser;
  bool fenced = false;  // the initialiser has called fence_mbarrier_init, so that copies may use it
  std::vector<Thread*> waiting;  // threads that wait for the end of the phase
  char order[2];  // objects that order what happens before the end of a phase, by its parity

  void* object(int64_t of_phase) { return &order[of_phase & 1]; }
};

// A copy of a box or of some bytes. Its destination is NaN until it arrives; its source is read at
// the beginning or at the end: both must find the same.
struct BulkCopy {
  struct Row {  // what lies outside of [begin, end) becomes zero
    const char* source;
    int begin, end;
  };

  Block* block = nullptr;
  uint32_t destination = 0, barrier = 0;  // offsets in shared memory
  int row_bytes = 0;
  bool swizzled = false;
  std::vector<Row> rows;
  std::vector<char> data;
  std::source_location where;

  uint32_t num_bytes() const { return static_cast<uint32_t>(rows.size()) * row_bytes; }
  void read();
};
// Writes what a copy has read into shared memory, and tells its barrier.
void arrive_in_shared_memory(BulkCopy& copy);

// Shared memory as copies and products see it: what threads wrote is in it after a fence of theirs.
struct AsyncProxy {
  std::vector<char> memory;
  std::map<uint32_t, Barrier> barriers;  // by their offsets
};

}  // namespace tree_attention::emulator
