// SPDX-License-Identifier: BSD-3-Clause
#include <c10/util/Exception.h>

#include <algorithm>
#include <limits>
#include <type_traits>
#include <vector>

#include "common/rows.h"
#include "cpu/aligned_memory.h"
#include "cpu/index/choice.h"
#include "cpu/index/index.h"
#include "cpu/index/scores.h"
#include "cpu/kernels.h"
#include "cpu/parallel.h"

namespace tree_attention::cpu {
namespace {

constexpr int64_t kTokens = 16;  // whose queries stay in the second-level cache with a tile of keys
constexpr int64_t kMaxEntries = 4 << 20;  // of all choices that are kept at a time: 32 MiB
// Multiply-adds of a worker: waking another one for fewer costs more than it gains.
constexpr int64_t kParallelWork = 1 << 19;

void check_slots(const IndexParams& p) {
  if (p.key_slots == nullptr) return;
  for (int64_t key = 0; key < p.seqlen_k; ++key) {
    TORCH_CHECK_VALUE(p.key_slots[key] > (key == 0 ? -1 : p.key_slots[key - 1]),
                      "index_topk: key_slots must increase from at least 0 on, got ",
                      p.key_slots[key], " at key ", key);
  }
}

KeyRange range_of(const IndexParams& p, int64_t batch, int64_t token) {
  if (p.key_ranges == nullptr) return {0, p.seqlen_k};
  return clamped_range<int64_t>(
      p.key_ranges + batch * p.key_ranges_stride[0] + token * p.key_ranges_stride[1], p.seqlen_k);
}

void check_pages(const IndexParams& p) {
  if (p.page_table == nullptr) return;
  for (int64_t batch = 0; batch < p.batch; ++batch) {
    std::vector<bool> is_checked(p.seqlen_k / p.page_size);
    for (int64_t token = 0; token < p.seqlen_q; ++token) {
      const KeyRange range = range_of(p, batch, token);
      for (int64_t page = range.begin / p.page_size;
           !range.empty() && page <= (range.end - 1) / p.page_size; ++page) {
        if (is_checked[page]) continue;
        is_checked[page] = true;
        const int32_t id = p.page_table[batch * p.page_table_stride + page];
        TORCH_CHECK_VALUE(0 <= id && id < p.num_pages,
                          "index_topk: page_table must hold page ids in [0, ", p.num_pages,
                          ") where key_ranges needs them, got ", id, " for page ", page,
                          " of sequence ", batch);
      }
    }
  }
}

// Blocks of local keys that have the score +inf.
struct LocalBlocks {
  int64_t begin, end;

  static LocalBlocks of(const IndexParams& p, int64_t batch, int64_t token) {
    if (p.local_blocks == 0) return {0, 0};
    const int64_t position = p.query_positions[batch * p.query_positions_stride[0] +
                                               token * p.query_positions_stride[1]];
    const int64_t end = position / p.block + 1;
    return {std::max<int64_t>(0, end - p.local_blocks), end};
  }
  bool has(int64_t block) const { return begin <= block && block < end; }
};

void check_positions(const IndexParams& p) {
  if (p.local_blocks == 0) return;
  for (int64_t batch = 0; batch < p.batch; ++batch) {
    for (int64_t token = 0; token < p.seqlen_q; ++token) {
      const int64_t position = p.query_positions[batch * p.query_positions_stride[0] +
                                                 token * p.query_positions_stride[1]];
      TORCH_CHECK_VALUE(0 <= position && position <= std::numeric_limits<int32_t>::max(),
                        "index_topk: query_positions must be in [0, 2^31) with local_blocks, got ",
                        position, " for token ", token, " of sequence ", batch);
    }
  }
}

float larger(float a, float b) { return (b > a) | (b != b) ? b : a; }

// The largest of at least one score. Lanes have maxima of their own, so that no comparison waits
// for the one before, and NaN is looked for apart: a maximum alone is one instruction.
float largest(const float* scores, int count) {
  constexpr int kLanes = 16;
  const auto without_nan = [](float a, float b) { return b > a ? b : a; };
  float lanes[kLanes];
  int32_t are_nan[kLanes] = {};
  std::fill_n(lanes, kLanes, scores[0]);
  const auto take = [&](int n, float score) {
    lanes[n] = without_nan(lanes[n], score);
    are_nan[n] |= score != score;
  };
  int i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int n = 0; n < kLanes; ++n) take(n, scores[i + n]);
  }
  for (int n = 0; i < count; ++i, ++n) take(n, scores[i]);
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int n = 0; n < half; ++n) {
      lanes[n] = without_nan(lanes[n], lanes[n + half]);
      are_nan[n] |= are_nan[n + half];
    }
  }
  return are_nan[0] ? std::numeric_limits<float>::quiet_NaN() : lanes[0];
}

// The choice of one query (and head) while its keys are read in the order of their slots.
class Reader {
 public:
  Reader(const IndexParams& p, int64_t batch, int64_t token)
      : p_(p),
        local_(LocalBlocks::of(p, batch, token)),
        choice_(p.topk, p.seqlen_k + local_.end - local_.begin, ScoreTile::kKeys) {
    constexpr float kFirst = std::numeric_limits<float>::infinity();
    // Local blocks have equal scores, so only the first topk of them can be chosen.
    const int64_t end = std::min<int64_t>(local_.end, local_.begin + p.topk);
    for (int64_t block = local_.begin; block < end; ++block) {
      choice_.offer(kFirst, static_cast<int32_t>(block));
      choice_.keep_best();
    }
  }

  void read(const float* scores, int64_t first, int count) {
    if (p_.block == 1) {
      choice_.offer(scores, count, [&](int i) { return slot(first + i); });
    } else {
      read_blocks(scores, first, count);
    }
    choice_.keep_best();
  }

  std::vector<Entry>& sorted() {
    offer_block();
    block_ = -1;
    return choice_.sorted();
  }

 private:
  int32_t slot(int64_t key) const {
    return p_.key_slots == nullptr ? static_cast<int32_t>(key) : p_.key_slots[key];
  }

  void read_blocks(const float* scores, int64_t first, int count) {
    for (int begin = 0, end; begin < count; begin = end) {
      const int32_t own = slot(first + begin);
      if (own >= block_end_) {
        offer_block();
        block_ = own / p_.block;
        block_end_ = (int64_t{block_} + 1) * p_.block;
        largest_ = scores[begin];
      }
      end = begin + 1;
      if (p_.key_slots == nullptr) {
        end = static_cast<int>(std::min<int64_t>(count, begin + block_end_ - own));
      } else {
        while (end < count && slot(first + end) < block_end_) ++end;
      }
      largest_ = larger(largest_, largest(scores + begin, end - begin));
    }
  }

  void offer_block() {
    if (block_ >= 0 && !local_.has(block_)) choice_.offer(largest_, block_);
  }

  const IndexParams& p_;
  LocalBlocks local_;
  Choice choice_;
  int32_t block_ = -1;
  int64_t block_end_ = 0;
  float largest_ = 0;
};

// How the call is cut: runs of tokens and heads, whose keys are cut into parts.
struct Cut {
  int64_t tokens, heads;  // of a unit
  int64_t token_units, head_units, parts, num_threads;

  int64_t num_units(const IndexParams& p) const { return p.batch * token_units * head_units; }

  static Cut of(const IndexParams& p) {
    Cut cut{};
    const int64_t work = p.batch * p.seqlen_q * p.num_heads * p.head_dim * p.seqlen_k;
    int64_t workers = p.num_workers > 0
                          ? p.num_workers
                          : std::clamp<int64_t>(work / kParallelWork, 1, at::get_num_threads());
    // A row of entries for each token and choice of a unit, and for each worker.
    const int64_t row = Choice::capacity(p.topk) + ScoreTile::kKeys;
    workers = std::clamp<int64_t>(kMaxEntries / row, 1, workers);
    const int64_t rows = std::max<int64_t>(1, kMaxEntries / (row * workers));
    cut.heads = p.weights == nullptr ? std::min<int64_t>(p.num_heads, rows) : p.num_heads;
    cut.tokens = std::clamp<int64_t>(rows / (p.weights == nullptr ? cut.heads : 1), 1,
                                     std::min(kTokens, p.seqlen_q));
    cut.head_units = (p.num_heads + cut.heads - 1) / cut.heads;
    cut.token_units = (p.seqlen_q + cut.tokens - 1) / cut.tokens;
    const int64_t units = cut.num_units(p);
    const int64_t tiles = (p.seqlen_k + ScoreTile::kKeys - 1) / ScoreTile::kKeys;
    cut.parts = p.num_workers < 0 ? 1
                                  : std::clamp<int64_t>((workers + units - 1) / units, 1,
                                                        std::max<int64_t>(1, tiles));
    cut.num_threads =
        std::min({workers, units * cut.parts, static_cast<int64_t>(at::get_num_threads())});
    return cut;
  }
};

struct Unit {
  int64_t batch, token, num_tokens, head, num_heads, part;
};

class Launch {
 public:
  explicit Launch(const IndexParams& p)
      : p_(p), cut_(Cut::of(p)), kernels_(scores_by(kernels().vectors)) {
    if (cut_.parts > 1) parts_.resize(p.batch * p.num_choices() * p.seqlen_q * cut_.parts);
  }

  void run() {
    const int64_t tasks = cut_.num_units(p_) * cut_.parts;
    for_each_task(tasks, cut_.num_threads, [&](int64_t task) { run_unit(unit(task)); });
    if (cut_.parts == 1) return;
    const int64_t rows = static_cast<int64_t>(parts_.size()) / cut_.parts;
    for_each_task(rows, cut_.num_threads, [&](int64_t row) { merge(row); });
  }

 private:
  Unit unit(int64_t task) const {
    Unit unit{};
    unit.part = task % cut_.parts;
    task /= cut_.parts;
    unit.head = task % cut_.head_units * cut_.heads;
    task /= cut_.head_units;
    unit.token = task % cut_.token_units * cut_.tokens;
    unit.batch = task / cut_.token_units;
    unit.num_heads = std::min(cut_.heads, p_.num_heads - unit.head);
    unit.num_tokens = std::min(cut_.tokens, p_.seqlen_q - unit.token);
    return unit;
  }

  KeyRange keys_of(const Unit& unit) const {
    KeyRange keys{0, 0};
    for (int64_t i = 0; i < unit.num_tokens; ++i) {
      keys = hull(keys, range_of(p_, unit.batch, unit.token + i));
    }
    if (keys.empty()) return keys;
    const int64_t tiles = (keys.end - keys.begin + ScoreTile::kKeys - 1) / ScoreTile::kKeys;
    const auto begin_of = [&](int64_t part) {
      return std::min(keys.end, keys.begin + part * tiles / cut_.parts * ScoreTile::kKeys);
    };
    return {begin_of(unit.part), begin_of(unit.part + 1)};
  }

  IndexHeads heads_of(const Unit& unit, int64_t token, float* weights) const {
    const int64_t element = unit.batch * p_.q_stride[0] + unit.head * p_.q_stride[1] +
                            (unit.token + token) * p_.q_stride[2];
    IndexHeads heads{
        p_.dtype,       unit.num_heads,
        p_.head_dim,    static_cast<const char*>(p_.q) + element * element_size(p_.dtype),
        p_.q_stride[1], nullptr,
        p_.scale,       p_.num_heads};
    if (p_.weights == nullptr) return heads;
    for (int64_t head = 0; head < p_.num_heads; ++head) {
      weights[head] = p_.weights[unit.batch * p_.weights_stride[0] + head * p_.weights_stride[1] +
                                 (unit.token + token) * p_.weights_stride[2]];
    }
    heads.weights = weights;
    return heads;
  }

  // Makes `tile` name the keys of the range `keys`, and after them further ones up to `end`.
  void locate(int64_t batch, KeyRange keys, int64_t end, ScoreTile& tile) const {
    constexpr int64_t kMost = std::extent_v<decltype(tile.keys)>;
    const auto size = static_cast<int64_t>(element_size(p_.dtype));
    const int64_t count = std::min(end - keys.begin, kMost);
    for (int64_t n = 0; n < count;) {
      int64_t sequence = batch, row = keys.begin + n, run_end = count;
      if (p_.page_table != nullptr) {
        sequence = p_.page_table[batch * p_.page_table_stride + row / p_.page_size];
        row %= p_.page_size;
        run_end = std::min(count, n + p_.page_size - row);
      }
      const char* key = static_cast<const char*>(p_.k) +
                        (sequence * p_.k_stride[0] + row * p_.k_stride[1]) * size;
      for (; n < run_end; ++n, key += p_.k_stride[1] * size) tile.keys[n] = key;
    }
    std::fill(tile.keys + count, tile.keys + kMost, tile.keys[count - 1]);
    tile.count = static_cast<int>(keys.end - keys.begin);
  }

  void run_unit(const Unit& unit) {
    const int64_t choices = p_.weights == nullptr ? unit.num_heads : 1;
    std::vector<float> weights(unit.num_tokens * p_.num_heads);
    std::vector<IndexHeads> heads;
    std::vector<Reader> readers;
    std::vector<KeyRange> ranges;
    for (int64_t i = 0; i < unit.num_tokens; ++i) {
      heads.push_back(heads_of(unit, i, weights.data() + i * p_.num_heads));
      ranges.push_back(range_of(p_, unit.batch, unit.token + i));
      for (int64_t c = 0; c < choices; ++c) readers.emplace_back(p_, unit.batch, unit.token + i);
    }
    const size_t query_bytes = aligned(kernels_.query_bytes(heads[0]));
    const size_t scratch_bytes = aligned(kernels_.scratch_bytes(heads[0]));
    const size_t bytes =
        unit.num_tokens * query_bytes + scratch_bytes + choices * ScoreTile::kKeys * sizeof(float);
    const AlignedMemory memory = aligned_memory(bytes);
    std::fill_n(memory.get(), bytes, 0);
    char* const scratch = memory.get() + unit.num_tokens * query_bytes;
    auto* const scores = reinterpret_cast<float*>(scratch + scratch_bytes);
    for (int64_t i = 0; i < unit.num_tokens; ++i) {
      kernels_.prepare(heads[i], memory.get() + i * query_bytes);
    }
    const KeyRange keys = keys_of(unit);
    ScoreTile tile;
    for (int64_t begin = keys.begin; begin < keys.end; begin += ScoreTile::kKeys) {
      const int64_t end = std::min(keys.end, begin + ScoreTile::kKeys);
      for (int64_t i = 0; i < unit.num_tokens; ++i) {
        const int64_t first = std::max(begin, ranges[i].begin);
        const int64_t last = std::min(end, ranges[i].end);
        if (first >= last) continue;
        locate(unit.batch, {first, last}, ranges[i].end, tile);
        kernels_.score(heads[i], memory.get() + i * query_bytes, tile, scratch, scores);
        for (int64_t c = 0; c < choices; ++c) {
          readers[i * choices + c].read(scores + c * ScoreTile::kKeys, first, tile.count);
        }
      }
    }
    for (int64_t i = 0; i < unit.num_tokens; ++i) {
      for (int64_t c = 0; c < choices; ++c) {
        std::vector<Entry>& entries = readers[i * choices + c].sorted();
        const int64_t row =
            (unit.batch * p_.num_choices() + unit.head + c) * p_.seqlen_q + unit.token + i;
        if (cut_.parts == 1) {
          Row result = row_of(row);
          for (const Entry entry : entries) result.add(entry);
          result.finish();
        } else {
          parts_[row * cut_.parts + unit.part].swap(entries);
        }
      }
    }
  }

  Row row_of(int64_t row) const {
    return Row(p_.scores + row * p_.topk, p_.slots + row * p_.topk, p_.topk);
  }

  // A block may have keys in two parts, and a local one is in all.
  void merge(int64_t row) {
    std::vector<Part> parts;
    int64_t num_entries = 0;
    for (int64_t part = 0; part < cut_.parts; ++part) {
      const std::vector<Entry>& entries = parts_[row * cut_.parts + part];
      parts.push_back({entries.data(), entries.data() + entries.size()});
      num_entries += static_cast<int64_t>(entries.size());
    }
    NamedSlots named;
    Row result = row_of(row);
    merge_parts(parts, std::min<int64_t>(p_.topk, num_entries), named,
                [&](Entry entry) { result.add(entry); });
    result.finish();
  }

  const IndexParams& p_;
  const Cut cut_;
  const ScoreKernels& kernels_;
  std::vector<std::vector<Entry>> parts_;  // [rows of results, parts]
};

}  // namespace

void index_topk(const IndexParams& p) {
  if (p.batch == 0 || p.seqlen_q == 0) return;
  check_slots(p);
  check_positions(p);
  check_pages(p);
  Launch(p).run();
}

}  // namespace tree_attention::cpu
