// SPDX-License-Identifier: BSD-3-Clause
//
// The lean schedule over threads. Work is a line of key tiles, all outputs end to end; worker w
// computes tiles [begin(w), begin(w + 1)). An output that several workers share is completed by
// whichever of them arrives last: nobody waits.
#include "decode.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <new>
#include <vector>

#include "args/host_values.h"
#include "common/fixup.h"
#include "common/partition.h"
#include "common/softmax_state.h"
#include "cpu/aligned_memory.h"
#include "cpu/kernels.h"
#include "cpu/merge_rows.h"
#include "cpu/parallel.h"

namespace tree_attention::cpu {
namespace {

// Below this many multiply-adds one thread finishes before a second one has woken up.
constexpr int64_t kParallelWork = 1 << 19;

// A long call has more workers than threads, so that threads on undisturbed cores can take workers
// over from the others. Workers of fewer tiles would cost 1 % of an undisturbed call: each begins
// without keys fetched ahead, and may leave two partial states.
constexpr int64_t kMaxWorkersPerThread = 8, kMinWorkerTiles = 256, kMinWorkerTilesPerRow = 2;

// Partial states of more are freed after the call: on 64 threads, prompts over latents take 1.2 GB
// in every thread that calls. Steps of decoding take less, and their memory is never mapped again:
// 128 heads of 512 columns need 34 MB there times a thread's workers, which are at most seven up to
// eight million keys.
constexpr size_t kMaxKeptBytes = size_t{256} << 20;

// Memory of one thread, aligned to a cache line. It only grows, until it is freed.
class Scratch {
 public:
  void* reserve(size_t bytes) {
    if (bytes > size_) {
      free_beyond(0);
      const size_t size = (bytes + 4095) / 4096 * 4096;
      data_ = aligned_memory(size);
      size_ = size;
    }
    return data_.get();
  }

  void free_beyond(size_t bytes) {
    if (size_ <= bytes) return;
    data_.reset();
    size_ = 0;
  }

 private:
  AlignedMemory data_;
  size_t size_ = 0;
};

// Outputs in the order (sequence, kv head, row block), and their tiles on the line.
struct Schedule {
  int64_t blocks_per_head, rows_per_block, tile_keys;
  std::vector<KeyRange> hulls;        // [batch, row block]: all keys that a row of the block sees
  std::vector<int64_t> tile_offsets;  // [outputs + 1]
  Partition partition;

  int64_t num_outputs() const { return static_cast<int64_t>(tile_offsets.size()) - 1; }

  Rows rows(const DecodeParams& p, int64_t output) const {
    const int64_t block = output % blocks_per_head, head = output / blocks_per_head;
    const int64_t begin = block * rows_per_block;
    const int64_t num_rows = int64_t{p.group_size()} * p.seqlen_q;
    return {head / p.num_heads_kv, head % p.num_heads_kv, begin,
            std::min(rows_per_block, num_rows - begin)};
  }

  KeyRange hull(const Rows& rows) const {
    return hulls[rows.batch * blocks_per_head + rows.begin / rows_per_block];
  }
};

void build_schedule(const DecodeParams& p, int64_t rows_per_block, Schedule& schedule) {
  const int64_t group_size = p.group_size(), num_rows = group_size * p.seqlen_q;
  schedule.rows_per_block = rows_per_block;
  // An output of one tile is not cut.
  schedule.tile_keys = p.num_workers < 0 ? std::max(p.seqlen_k, int64_t{1}) : kTileKeys;
  schedule.blocks_per_head = (num_rows + rows_per_block - 1) / rows_per_block;
  schedule.hulls.clear();
  schedule.tile_offsets.assign(1, 0);
  int64_t work = 0;
  for (int64_t batch = 0; batch < p.batch; ++batch) {
    for (int64_t block = 0; block < schedule.blocks_per_head; ++block) {
      const int64_t begin = block * rows_per_block;
      const int64_t end = std::min(begin + rows_per_block, num_rows);
      schedule.hulls.push_back(
          hull_of_tokens(p, batch, begin / group_size, (end - 1) / group_size + 1));
      const KeyRange hull = schedule.hulls.back();
      work += (hull.end - hull.begin) * (end - begin) * p.num_heads_kv;
    }
    const KeyRange* hulls = schedule.hulls.data() + batch * schedule.blocks_per_head;
    for (int64_t head = 0; head < p.num_heads_kv; ++head) {
      for (int64_t block = 0; block < schedule.blocks_per_head; ++block) {
        const int64_t num_keys = hulls[block].end - hulls[block].begin;
        schedule.tile_offsets.push_back(schedule.tile_offsets.back() +
                                        (num_keys + schedule.tile_keys - 1) / schedule.tile_keys);
      }
    }
  }
  const int64_t num_tiles = schedule.tile_offsets.back();
  int64_t max_workers = p.num_workers;
  if (max_workers <= 0) {
    const bool serial =
        at::in_parallel_region() || work * (p.head_dim + p.head_dim_v) < kParallelWork;
    const int64_t min_tiles = std::max(kMinWorkerTiles, kMinWorkerTilesPerRow * rows_per_block);
    const int64_t num_threads = at::get_num_threads();
    max_workers = serial ? 1
                         : num_threads * std::clamp(num_tiles / (num_threads * min_tiles),
                                                    int64_t{1}, kMaxWorkersPerThread);
  }
  schedule.partition = Partition::over(num_tiles, max_workers);
}

// Checks the page ids that some range needs; ids elsewhere may be anything.
void check_page_table(const DecodeParams& p) {
  if (p.page_table == nullptr) return;
  const int64_t num_lists = p.page_table_stride[1] == 0 ? 1 : p.num_heads_kv;
  for (int64_t batch = 0; batch < p.batch; ++batch) {
    KeyRange checked{0, 0};
    for (int64_t token = 0; token < p.seqlen_q; ++token) {
      const KeyRange range = key_range(p, batch, token);
      if (range.begin == range.end) continue;
      const bool overlaps =
          checked.begin < checked.end && range.begin <= checked.end && checked.begin <= range.end;
      if (overlaps && checked.begin <= range.begin && range.end <= checked.end) continue;
      // Causal queries extend each other's ranges, so look only at what is new on the right.
      const int64_t begin = overlaps && checked.begin <= range.begin ? checked.end : range.begin;
      const int64_t page_end = (range.end - 1) / p.page_size + 1;
      for (int64_t head = 0; head < num_lists; ++head) {
        const int32_t* pages =
            p.page_table + batch * p.page_table_stride[0] + head * p.page_table_stride[1];
        for (int64_t page = begin / p.page_size; page < page_end; ++page) {
          check_page_id(p, batch, page, pages[page]);
        }
      }
      checked = overlaps ? KeyRange{std::min(checked.begin, range.begin),
                                    std::max(checked.end, range.end)}
                         : range;
    }
  }
}

// The partial states of outputs that several workers share, by slot.
class PartialStates {
 public:
  static size_t bytes(int64_t num_workers, int64_t num_rows, int64_t head_dim) {
    return num_partial_slots(num_workers) * num_rows * (head_dim + 1) * sizeof(float);
  }
  PartialStates(void* memory, int64_t num_rows, int64_t head_dim)
      : memory_(static_cast<float*>(memory)), num_rows_(num_rows), head_dim_(head_dim) {}

  float* o(int64_t slot) const { return memory_ + slot * num_rows_ * (head_dim_ + 1); }
  float* lse(int64_t slot) const { return o(slot) + num_rows_ * head_dim_; }

  // Merges the step's parts into the slot of the first one.
  void merge_parts(const Contributors& workers, const MergeStep& step, int64_t num_rows) const {
    const auto slot = [&](int64_t i) {
      return partial_slot(workers, step.first + i * step.stride);
    };
    merge_in_canonical_order(step.count, [&](int64_t i, int64_t j) {
      float *o_a = o(slot(i)), *lse_a = lse(slot(i));
      const float *o_b = o(slot(j)), *lse_b = lse(slot(j));
      for (int64_t row = 0; row < num_rows; ++row) {
        const Merge merged = merge(lse_a[row], lse_b[row]);
        merge_row(merged, o_a + row * head_dim_, o_b + row * head_dim_, o_a + row * head_dim_,
                  head_dim_);
        lse_a[row] = merged.lse;
      }
    });
  }

 private:
  float* memory_;
  int64_t num_rows_, head_dim_;
};

struct Launch {
  const DecodeParams& params;
  const Kernels& isa;
  const Schedule& schedule;
  PartialStates partials;
  std::atomic<int32_t>* arrivals;  // [slots]

  void run(int64_t worker) const {
    const Partition& partition = schedule.partition;
    const int64_t line_end = partition.begin(worker + 1);
    const int64_t max_rows = schedule.rows_per_block;
    const size_t workspace_bytes = aligned(isa.workspace_bytes(params, max_rows));
    thread_local Scratch scratch;
    char* workspace = static_cast<char*>(
        scratch.reserve(workspace_bytes + max_rows * (params.head_dim_v + 1) * sizeof(float)));
    const PartialStates own(workspace + workspace_bytes, max_rows, params.head_dim_v);

    int64_t tile = partition.begin(worker);
    for (int64_t output = find_output(schedule.tile_offsets.data(), schedule.num_outputs(), tile);
         tile < line_end; ++output) {
      const int64_t output_begin = schedule.tile_offsets[output];
      const int64_t output_end = schedule.tile_offsets[output + 1];
      if (output_begin == output_end) continue;
      const int64_t tile_end = std::min(line_end, output_end);
      const Rows rows = schedule.rows(params, output);
      const KeyRange hull = schedule.hull(rows);
      const KeyRange keys{
          hull.begin + (tile - output_begin) * schedule.tile_keys,
          std::min(hull.end, hull.begin + (tile_end - output_begin) * schedule.tile_keys)};
      if (tile == output_begin && tile_end == output_end) {
        isa.attend(params, rows, keys, workspace, own.o(0), own.lse(0));
        isa.store(params, rows, own.o(0), own.lse(0));
      } else {
        const Contributors workers = contributors(partition, output_begin, output_end);
        const int64_t part = worker - workers.first, slot = partial_slot(workers, part);
        isa.attend(params, rows, keys, workspace, partials.o(slot), partials.lse(slot));
        complete(workers, part, rows);
      }
      tile = tile_end;
    }
  }

  // The last of the workers that share an output merges and stores it.
  void complete(const Contributors& workers, int64_t part, const Rows& rows) const {
    const auto arrive = [&](int64_t counter, int64_t expected) {
      return arrivals[counter].fetch_add(1, std::memory_order_acq_rel) + 1 == expected;
    };
    fix_up(workers, part, arrive, [&](const MergeStep& step) {
      partials.merge_parts(workers, step, rows.count);
      const int64_t first = partial_slot(workers, step.first);
      if (step.completes_output) isa.store(params, rows, partials.o(first), partials.lse(first));
    });
  }

  void store_empty_outputs() const {
    std::vector<float> zeros, empty;
    for (int64_t output = 0; output < schedule.num_outputs(); ++output) {
      if (schedule.tile_offsets[output] != schedule.tile_offsets[output + 1]) continue;
      zeros.resize(schedule.rows_per_block * params.head_dim_v, 0.0f);
      empty.resize(schedule.rows_per_block, -INFINITY);
      isa.store(params, schedule.rows(params, output), zeros.data(), empty.data());
    }
  }
};

bool has_rows(const DecodeParams& p) {
  return p.batch != 0 && p.num_heads_q != 0 && p.seqlen_q != 0;
}

}  // namespace

void check_decode(const DecodeParams& params) {
  if (has_rows(params)) check_page_table(params);
}

void lean_decode(const DecodeParams& params) {
  if (!has_rows(params)) return;
  check_page_table(params);
  const Kernels& isa = kernels();

  thread_local Schedule schedule;
  thread_local Scratch scratch;
  const int64_t num_rows = int64_t{params.group_size()} * params.seqlen_q;
  build_schedule(params, std::min(num_rows, isa.max_rows(params)), schedule);

  const int64_t num_workers = schedule.partition.num_workers;
  const int64_t num_counters = num_partial_slots(num_workers);
  const size_t arrivals_bytes = aligned(num_counters * sizeof(std::atomic<int32_t>));
  char* memory = static_cast<char*>(
      scratch.reserve(arrivals_bytes + PartialStates::bytes(num_workers, schedule.rows_per_block,
                                                            params.head_dim_v)));
  auto* arrivals = reinterpret_cast<std::atomic<int32_t>*>(memory);
  for (int64_t i = 0; i < num_counters; ++i) new (arrivals + i) std::atomic<int32_t>(0);

  const Launch launch{
      params, isa, schedule,
      PartialStates(memory + arrivals_bytes, schedule.rows_per_block, params.head_dim_v), arrivals};
  launch.store_empty_outputs();
  if (schedule.partition.num_tiles == 0) return;
  if (num_workers == 1) {
    launch.run(0);
  } else {
    for_each_task(num_workers, at::get_num_threads(), [&](int64_t worker) { launch.run(worker); });
  }
  scratch.free_beyond(kMaxKeptBytes);
}

}  // namespace tree_attention::cpu
