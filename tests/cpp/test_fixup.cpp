// SPDX-License-Identifier: BSD-3-Clause
//
// The fix-up protocol on random lines with real merges. Arrivals nest at random: while a worker is
// about to arrive anywhere, others run, so that each counter sees its workers in any order.
#include <atomic>
#include <cmath>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "check.h"
#include "common/fixup.h"
#include "common/softmax_state.h"

using tree_attention::Contributors;
using tree_attention::MergeStep;
using tree_attention::Partition;

namespace {

struct State {
  float o, lse;
};

// Merges states[0], states[stride], ... into states[0].
template <typename At>
void merge_states(const MergeStep& step, At at) {
  tree_attention::merge_in_canonical_order(step.count, [&](int64_t i, int64_t j) {
    State &a = at(step.first + i * step.stride), &b = at(step.first + j * step.stride);
    const auto merged = tree_attention::merge(a.lse, b.lse);
    a = {merged(a.o, b.o), merged.lse};
  });
}

State random_state(std::mt19937& random) {
  if (random() % 4 == 0) return {NAN, -INFINITY};
  return {std::normal_distribution<float>()(random), std::normal_distribution<float>(0, 5)(random)};
}

bool same_bits(const State& a, const State& b) { return std::memcmp(&a, &b, sizeof a) == 0; }

struct Output {
  Contributors workers;
  std::vector<State> parts;  // of each contributor
  State result;
  int times_completed = 0;
};

// Who shares an output of the line, with a state for each.
std::vector<Output> split_outputs(const Partition& partition, const std::vector<int64_t>& tiles,
                                  int64_t overhead, std::mt19937& random) {
  std::vector<Output> outputs;
  int64_t end = 0;
  for (int64_t count : tiles) {
    const int64_t begin = end + overhead;
    end = begin + count;
    if (count == 0) continue;
    Output output{contributors(partition, begin, end), {}, {NAN, NAN}};
    for (int64_t part = 0; part < output.workers.count; ++part) {
      output.parts.push_back(random_state(random));
    }
    if (output.workers.count > 1) outputs.push_back(output);
  }
  return outputs;
}

void check_results(std::vector<Output>& outputs) {
  for (Output& output : outputs) {
    CHECK(output.times_completed == 1, output.times_completed, " times");
    merge_states({0, 1, output.workers.count, true},
                 [&](int64_t part) -> State& { return output.parts[part]; });
    CHECK(same_bits(output.parts[0], output.result), output.workers.count,
          " contributors: ", output.result.lse, " is not the flat merge's ", output.parts[0].lse);
  }
}

class Simulation {
 public:
  Simulation(const Partition& partition, std::vector<Output>& outputs, std::mt19937& random,
             int64_t max_merged = tree_attention::kMaxMergedParts)
      : random_(random),
        max_merged_(max_merged),
        slots_(tree_attention::num_partial_slots(partition.num_workers)),
        stored_(slots_.size(), false),
        counters_(slots_.size(), 0),
        expected_(slots_.size(), 0) {
    for (Output& output : outputs) {
      for (int64_t part = 0; part < output.workers.count; ++part) {
        pending_.push_back({&output, part});
      }
    }
  }

  void run() {
    while (!pending_.empty()) step();
    for (size_t i = 0; i < counters_.size(); ++i) CHECK(counters_[i] == 0, "counter ", i);
  }

 private:
  struct Contribution {
    Output* output;
    int64_t part;
  };

  void step() {
    std::swap(pending_[random_() % pending_.size()], pending_.back());
    const auto [output, part] = pending_.back();
    pending_.pop_back();
    const auto slot = [&, output = output](int64_t i) {
      return tree_attention::partial_slot(output->workers, i);
    };
    CHECK(!stored_[slot(part)], "slot ", slot(part), " is stored twice");
    stored_[slot(part)] = true;
    slots_[slot(part)] = output->parts[part];

    const auto arrive = [&](int64_t counter, int64_t expected) {
      while (!pending_.empty() && random_() % 2) step();
      CHECK(expected > 1, expected);
      CHECK(counters_[counter] == 0 || expected_[counter] == expected, "counter ", counter,
            " is shared by merges of ", expected, " and ", expected_[counter]);
      expected_[counter] = expected;
      if (++counters_[counter] < expected) return false;
      counters_[counter] = 0;
      return true;
    };
    const auto merge = [&, output = output](const MergeStep& step) {
      CHECK(1 < step.count && step.count <= max_merged_, step.count);
      merge_states(step, [&](int64_t i) -> State& {
        CHECK(i < output->workers.count && stored_[slot(i)], "part ", i, " is not there yet");
        return slots_[slot(i)];
      });
      if (!step.completes_output) return;
      output->result = slots_[slot(step.first)];
      ++output->times_completed;
    };
    tree_attention::fix_up(output->workers, part, arrive, merge, max_merged_);
  }

  std::mt19937& random_;
  int64_t max_merged_;
  std::vector<Contribution> pending_;
  std::vector<State> slots_;
  std::vector<bool> stored_;
  std::vector<int64_t> counters_, expected_;
};

}  // namespace

void test_fixup() {
  std::mt19937 random(0);
  for (int repeat = 0; repeat < 4000; ++repeat) {
    const int64_t overhead = repeat % 3;
    std::vector<int64_t> tiles(1 + random() % 6);
    int64_t total = 0;
    for (int64_t& count : tiles) {
      count = random() % 3 == 0 ? 0 : random() % 200;
      total += overhead + count;
    }
    const auto partition = Partition::over(total, 1 + random() % (repeat % 2 ? 20 : 1000));
    std::vector<Output> outputs = split_outputs(partition, tiles, overhead, random);
    Simulation(partition, outputs, random).run();
    check_results(outputs);
  }
}

// Every number of contributors across the borders between one, two and three levels.
void test_fixup_levels() {
  std::mt19937 random(1);
  for (int64_t count = 2; count <= 1200; count += count < 100 || count % 16 > 13 ? 1 : 13) {
    const Partition partition{count, count};
    std::vector<Output> outputs = split_outputs(partition, {count}, 0, random);
    CHECK(outputs.size() == 1 && outputs[0].workers.count == count, count);
    for (int64_t num_rows : {8, 9}) {
      std::vector<Output> own = outputs;
      Simulation(partition, own, random, tree_attention::max_merged_parts(num_rows)).run();
      check_results(own);
    }
  }
}

// Threads for workers, each with plain memory for its states: what ThreadSanitizer watches.
void test_fixup_threads() {
  std::mt19937 random(2);
  for (int64_t num_workers : {3, 36, 90, 700}) {
    const std::vector<int64_t> tiles{num_workers / 3, num_workers * 4, 1, num_workers};
    const auto partition = Partition::over(6 * num_workers, num_workers);
    std::vector<Output> outputs = split_outputs(partition, tiles, 0, random);
    const int64_t num_slots = tree_attention::num_partial_slots(num_workers);
    std::vector<State> slots(num_slots);
    std::vector<std::atomic<int64_t>> counters(num_slots);
    const auto run = [&](int64_t worker) {
      for (Output& output : outputs) {
        const int64_t part = worker - output.workers.first;
        if (part < 0 || part >= output.workers.count) continue;
        const auto state = [&](int64_t i) -> State& {
          return slots[tree_attention::partial_slot(output.workers, i)];
        };
        state(part) = output.parts[part];
        tree_attention::fix_up(
            output.workers, part,
            [&](int64_t counter, int64_t expected) {
              if (counters[counter].fetch_add(1, std::memory_order_acq_rel) + 1 < expected) {
                return false;
              }
              counters[counter].store(0, std::memory_order_relaxed);
              return true;
            },
            [&](const MergeStep& step) {
              merge_states(step, state);
              if (!step.completes_output) return;
              output.result = state(0);
              ++output.times_completed;
            });
      }
    };
    std::vector<std::thread> threads;
    for (int64_t thread = 0; thread < 6; ++thread) {
      threads.emplace_back([&, thread] {
        for (int64_t i = thread; i < num_workers; i += 6) run(num_workers - 1 - i);
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (const auto& counter : counters) CHECK(counter == 0, counter.load());
    check_results(outputs);
  }
}
