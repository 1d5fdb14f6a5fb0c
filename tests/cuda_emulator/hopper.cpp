// SPDX-License-Identifier: BSD-3-Clause
//
// Barriers and copies of compute capability 9.0, and its tensor maps.
#include "hopper.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "block.h"
#include "cuda_runtime_api.h"
#include "machine.h"
#include "run.h"
#include "sanitizers.h"

namespace tree_attention::emulator {
namespace {

constexpr uint64_t kBarrierWord = 0xffff'ba11'ffff'ba11;  // the word of a device is not documented
constexpr int64_t kMostBytes = (1 << 20) - 1;             // that a phase may wait for (9.7.13.15.2)
constexpr uint32_t kMostArrivals = (1 << 20) - 1;
constexpr uint32_t kSwizzleRow = 128, kSwizzleRepeat = 1024;

// A tensor map as this emulator's cuTensorMapEncodeTiled makes it.
struct TensorMap {
  uint64_t mark;
  const char* address;
  uint64_t sizes[5];
  uint64_t strides[5];  // in bytes; the first is the size of an element
  uint16_t box[5];
  uint8_t rank;
  bool swizzled;
};
static_assert(sizeof(TensorMap) <= sizeof(CUtensorMap));
constexpr uint64_t kMark = 0x70616d726f736e74;

Block& own_block() { return *Run::current->warp->block; }

// Offset in this block's shared memory of `size` bytes at a shared address.
uint32_t own_offset(uint32_t address, int size, const std::source_location& where) {
  const int64_t offset = shared_bytes(address, size, where) - own_block().shared.get();
  if (offset < 0 || offset >= static_cast<int64_t>(own_block().shared_bytes)) {
    fail("barriers and copies in the memory of another block are not emulated", where);
  }
  return static_cast<uint32_t>(offset);
}

void require_multiple(uint64_t value, uint32_t of, const char* what,
                      const std::source_location& where) {
  if (value % of != 0) fail(std::string(what) + " is no multiple of " + std::to_string(of), where);
}

// The barrier at a shared address, after its offset. Its word in memory must be kBarrierWord, which
// mbarrier_init leaves there.
std::pair<uint32_t, Barrier*> find_barrier(uint32_t address, const std::source_location& where) {
  const char* const word = shared_bytes(address, sizeof(kBarrierWord), where);
  const uint32_t offset = own_offset(address, sizeof(kBarrierWord), where);
  record_read(word, sizeof(kBarrierWord));
  const Hidden hidden;
  auto& barriers = own_block().async().barriers;
  const auto found = barriers.find(offset);
  if (found == barriers.end()) {
    fail("no barrier was initialised at " + std::to_string(offset), where);
  }
  if (std::memcmp(word, &kBarrierWord, sizeof(kBarrierWord)) != 0) {
    fail("the memory of the barrier at " + std::to_string(offset) + " was overwritten", where);
  }
  return {offset, &found->second};
}

// Ends the phase of a barrier if no arrivals and no bytes are missing. Returns the error if more
// bytes have come than were expected, else null.
const char* go_on(Barrier& barrier) {
  if (barrier.pending != 0) return nullptr;
  if (barrier.bytes < 0) return "more bytes have come than the phase was to wait for";
  if (barrier.bytes > 0) return nullptr;
  ++barrier.phase;
  barrier.pending = barrier.count;
  for (Thread* thread : barrier.waiting) {
    thread->at_barrier = false;
    Run::running->wake(*thread);
  }
  barrier.waiting.clear();
  return nullptr;
}

// Fails where the answer to a wait cannot tell phases apart. A device knows only the parity of a
// phase, so that its answer may be about another phase than the thread means.
void require_known_phase(const Barrier& barrier, uint32_t parity, const int64_t* seen,
                         const std::source_location& where) {
  if (seen == nullptr) return;
  const bool again = (*seen & 1) == parity;
  if (again && barrier.phase == *seen + 1) {
    fail(
        "a wait for the parity of a phase that this thread has seen end: of the one after the "
        "next it says nothing",
        where);
  }
  if (!again && barrier.phase >= *seen + 3 && (barrier.phase & 1) == parity) {
    fail("a wait for a phase after which another one of the other parity has ended, too", where);
  }
}

TensorMap read_map(const CUtensorMap* map, const std::source_location& where) {
  require_multiple(reinterpret_cast<uintptr_t>(map), 64, "the address of a tensor map", where);
  TensorMap read;
  std::memcpy(&read, map, sizeof(read));
  if (read.mark != kMark) fail("no tensor map is there", where);
  return read;
}

// Begins a copy whose rows are known.
void begin(BulkCopy copy, uint32_t destination, uint32_t barrier_address, uint32_t alignment,
           const std::source_location& where) {
  Block& block = own_block();
  copy.block = &block;
  copy.where = where;
  copy.destination = own_offset(destination, 1, where);
  require_multiple(copy.destination, alignment, "the destination of a copy", where);
  if (copy.destination + copy.num_bytes() > block.shared_bytes) {
    fail("a copy of " + std::to_string(copy.num_bytes()) + " bytes to " +
             std::to_string(copy.destination) + ", of " + std::to_string(block.shared_bytes),
         where);
  }
  Barrier* barrier;
  std::tie(copy.barrier, barrier) = find_barrier(barrier_address, where);
  if (!barrier->fenced) {
    fail("a copy uses a barrier that no fence.mbarrier_init has followed", where);
  }
  for (const BulkCopy::Row& row : copy.rows) {
    if (row.begin == row.end) continue;
    note_request({row.source + row.begin, row.end - row.begin});
    record_read(row.source + row.begin, row.end - row.begin);
  }
  char* const bytes = block.shared.get() + copy.destination;
  record_write(bytes, copy.num_bytes());
  release(barrier->object(barrier->phase));
  const Hidden hidden;
  char* const seen = block.async().memory.data() + copy.destination;
  if (std::memcmp(bytes, seen, copy.num_bytes()) != 0) {
    fail("threads have written to the destination of a copy without fence.proxy.async", where);
  }
  if (Run::running->coin()) copy.read();
  std::memset(bytes, kPoison, copy.num_bytes());
  std::memset(seen, kPoison, copy.num_bytes());
  Run::running->begin(std::move(copy));
}

}  // namespace

void BulkCopy::read() {
  data.assign(num_bytes(), 0);
  for (size_t r = 0; r < rows.size(); ++r) {
    for (int b = rows[r].begin; b < rows[r].end;) {
      const int end = std::min(b / 16 * 16 + 16, rows[r].end);
      uint32_t to = static_cast<uint32_t>(r) * row_bytes + b;
      if (swizzled) to ^= (destination + to) / kSwizzleRow % 8 * 16;
      std::memcpy(data.data() + to, rows[r].source + b, end - b);
      b = end;
    }
  }
}

void arrive_in_shared_memory(BulkCopy& copy) {
  Block& block = *copy.block;
  if (copy.data.empty()) copy.read();
  std::memcpy(block.shared.get() + copy.destination, copy.data.data(), copy.data.size());
  std::memcpy(block.async().memory.data() + copy.destination, copy.data.data(), copy.data.size());
  const auto found = block.async().barriers.find(copy.barrier);
  found->second.bytes -= copy.num_bytes();
  if (const char* error = go_on(found->second)) {
    throw Error(at(copy.where) + ": " + error);
  }
}

bool named_barrier(uint32_t number, uint32_t count, bool votes, bool predicate,
                   const std::source_location& where) {
  const Hidden hidden;
  Block& block = own_block();
  if (number < 1 || number > 15) fail("a barrier " + std::to_string(number), where);
  if (count == 0 || count % kWarpSize != 0 || count > block.grid->num_threads) {
    fail("a barrier of " + std::to_string(count) + " threads", where);
  }
  NamedBarrier& barrier = block.named_barriers[number];
  void* const object = barrier.object();
  release(object);
  if (barrier.arrived.empty()) {
    barrier.count = count;
    barrier.votes = votes;
    barrier.any = false;
  } else if (barrier.count != count || barrier.votes != votes) {
    fail("others wait at barrier " + std::to_string(number) + " for " +
             std::to_string(barrier.count) + " threads" + (barrier.votes ? " and a vote" : ""),
         where);
  }
  bool any = false;
  barrier.any = barrier.any || predicate;
  barrier.arrived.push_back({Run::current, &any});
  if (barrier.arrived.size() == count) {
    for (const auto& arrival : barrier.arrived) {
      *arrival.any = barrier.any;
      Run::running->wake(*arrival.thread);
    }
    barrier.arrived.clear();
    ++barrier.generation;
    Run::running->change_thread_at(where);
  } else {
    Run::running->wait_for(votes ? "bar.red" : "bar.sync", where);
  }
  acquire(object);
  return any;
}

void init_barrier(uint32_t address, uint32_t count, const std::source_location& where) {
  char* const word = shared_bytes(address, sizeof(kBarrierWord), where);
  const uint32_t offset = own_offset(address, sizeof(kBarrierWord), where);
  record_write(word, sizeof(kBarrierWord));
  const Hidden hidden;
  if (count == 0 || count > kMostArrivals) {
    fail("a barrier of " + std::to_string(count) + " arrivals", where);
  }
  if (!own_block().async().barriers.try_emplace(offset, count, Run::current).second) {
    fail("a barrier is initialised that is one already", where);
  }
  std::memcpy(word, &kBarrierWord, sizeof(kBarrierWord));
}

void fence_barriers() {
  const Hidden hidden;
  for (auto& [offset, barrier] : own_block().async().barriers) {
    barrier.fenced = barrier.fenced || barrier.initialiser == Run::current;
  }
}

void arrive_at_barrier(uint32_t address, uint32_t bytes, const std::source_location& where) {
  Barrier& barrier = *find_barrier(address, where).second;
  release(barrier.object(barrier.phase));
  const Hidden hidden;
  if (barrier.pending == 0) {
    fail("an arrival beyond the " + std::to_string(barrier.count) + " of the phase", where);
  }
  barrier.bytes += bytes;
  if (barrier.bytes > kMostBytes) fail("a barrier counts up to 1048575 bytes", where);
  --barrier.pending;
  if (const char* error = go_on(barrier)) fail(error, where);
  Run::running->change_thread_at(where);
}

bool wait_for_phase(uint32_t address, uint32_t parity, const std::source_location& where) {
  const auto [offset, barrier] = find_barrier(address, where);
  if (parity > 1) fail("a parity of " + std::to_string(parity), where);
  {
    const Hidden hidden;
    Thread& thread = *Run::current;
    const auto seen = thread.phases.find(offset);
    require_known_phase(*barrier, parity, seen == thread.phases.end() ? nullptr : &seen->second,
                        where);
    Run::running->change_thread_at(where);
    if ((barrier->phase & 1) == parity) {
      // A device's try_wait may return false before the phase has ended.
      if (Run::running->once_in(4)) return false;
      barrier->waiting.push_back(&thread);
      thread.at_barrier = true;
      Run::running->wait_for("mbarrier.try_wait", where);
    }
    thread.phases[offset] = barrier->phase - 1;
  }
  acquire(barrier->object(parity));
  return true;
}

void fence_async_proxy() {
  const Hidden hidden;
  Block& block = own_block();
  std::memcpy(block.async().memory.data(), block.shared.get(), block.shared_bytes);
}

void begin_box_copy(uint32_t destination, const CUtensorMap* encoded,
                    const int32_t (&coordinates)[4], uint32_t barrier,
                    const std::source_location& where) {
  constexpr int kRank = 4;
  const TensorMap map = read_map(encoded, where);
  if (map.rank != kRank) {
    fail("a copy of " + std::to_string(kRank) + " dimensions with a tensor map of " +
             std::to_string(map.rank),
         where);
  }
  const int element = static_cast<int>(map.strides[0]);
  BulkCopy copy;
  copy.row_bytes = map.box[0] * element;
  copy.swizzled = map.swizzled;
  if (map.swizzled && copy.row_bytes != kSwizzleRow) {
    fail("only rows of 128 bytes are emulated with a swizzle", where);
  }
  const auto inside = [&](int dimension, int64_t i) {
    return static_cast<int>(std::clamp<int64_t>(i, 0, map.sizes[dimension]) - coordinates[0]);
  };
  const int begin_byte = inside(0, coordinates[0]) * element;
  const int end_byte = inside(0, int64_t{coordinates[0]} + map.box[0]) * element;
  int num_rows = 1;
  for (int i = 1; i < kRank; ++i) num_rows *= map.box[i];
  for (int r = 0; r < num_rows; ++r) {
    int64_t offset = coordinates[0] * int64_t{element};
    bool exists = begin_byte < end_byte;
    for (int i = 1, rest = r; i < kRank; rest /= map.box[i], ++i) {
      const int64_t place = int64_t{coordinates[i]} + rest % map.box[i];
      exists = exists && place >= 0 && place < static_cast<int64_t>(map.sizes[i]);
      offset += place * static_cast<int64_t>(map.strides[i]);
    }
    copy.rows.push_back(exists ? BulkCopy::Row{map.address + offset, begin_byte, end_byte}
                               : BulkCopy::Row{nullptr, 0, 0});
  }
  begin(std::move(copy), destination, barrier, map.swizzled ? kSwizzleRepeat : 128, where);
}

}  // namespace tree_attention::emulator

CUresult cuTensorMapEncodeTiled(CUtensorMap* encoded, CUtensorMapDataType type, cuuint32_t rank,
                                void* address, const cuuint64_t* sizes, const cuuint64_t* strides,
                                const cuuint32_t* box, const cuuint32_t* element_strides,
                                CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion, CUtensorMapFloatOOBfill fill) {
  using tree_attention::emulator::kMark;
  const int element = type == CU_TENSOR_MAP_DATA_TYPE_UINT8     ? 1
                      : type == CU_TENSOR_MAP_DATA_TYPE_FLOAT32 ? 4
                                                                : 2;
  if (rank < 1 || rank > 5 || reinterpret_cast<uintptr_t>(encoded) % 64 != 0 ||
      reinterpret_cast<uintptr_t>(address) % 16 != 0 ||
      interleave != CU_TENSOR_MAP_INTERLEAVE_NONE || fill != CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  tree_attention::emulator::TensorMap map{};
  map.mark = kMark;
  map.address = static_cast<const char*>(address);
  map.rank = static_cast<uint8_t>(rank);
  map.swizzled = swizzle == CU_TENSOR_MAP_SWIZZLE_128B;
  map.strides[0] = element;
  for (cuuint32_t i = 0; i < rank; ++i) {
    if (sizes[i] < 1 || sizes[i] > uint64_t{1} << 32) return CUDA_ERROR_INVALID_VALUE;
    if (box[i] < 1 || box[i] > 256 || element_strides[i] != 1) return CUDA_ERROR_INVALID_VALUE;
    map.sizes[i] = sizes[i];
    map.box[i] = static_cast<uint16_t>(box[i]);
  }
  for (cuuint32_t i = 1; i < rank; ++i) {
    if (strides[i - 1] % 16 != 0 || strides[i - 1] >= uint64_t{1} << 40) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    map.strides[i] = strides[i - 1];
  }
  if (box[0] * element % 16 != 0 || (map.swizzled && box[0] * element > 128)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  std::memcpy(encoded->opaque, &map, sizeof(map));
  return CUDA_SUCCESS;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  const bool known = has_driver_functions && std::strcmp(symbol, "cuTensorMapEncodeTiled") == 0;
  *function = known ? reinterpret_cast<void*>(&cuTensorMapEncodeTiled) : nullptr;
  if (result != nullptr) {
    *result = known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  }
  return cudaSuccess;
}
