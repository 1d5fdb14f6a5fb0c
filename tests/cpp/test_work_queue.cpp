// SPDX-License-Identifier: BSD-3-Clause
#include <vector>

#include "check.h"
#include "cpu/work_queue.h"

using tree_attention::cpu::WorkQueue;

// Each thread in turn stalls in each of its workers, while the others go on to their ends: they
// leave it nothing but that worker.
void test_work_queue() {
  for (int64_t num_threads = 1; num_threads <= 5; ++num_threads) {
    for (int64_t num_workers = num_threads; num_workers <= 17; ++num_workers) {
      for (int64_t stalled = 0; stalled < num_threads; ++stalled) {
        const int64_t begin = stalled * num_workers / num_threads,
                      end = (stalled + 1) * num_workers / num_threads;
        for (int64_t worker = begin; worker < end; ++worker) {
          WorkQueue queue(num_workers, num_threads);
          CHECK(queue.num_threads() == num_threads, num_threads);
          std::vector<int> runs(num_workers, 0);
          int64_t num_left = num_workers;
          const auto run = [&](int64_t other) {
            ++runs[other];
            --num_left;
          };
          queue.run(stalled, [&](int64_t own) {
            run(own);
            if (own != worker) return;
            for (int64_t thread = 0; thread < num_threads; ++thread) {
              if (thread != stalled) queue.run(thread, run);
            }
            CHECK(num_threads == 1 || num_left == 0, num_left, " left by thread ", stalled, " of ",
                  num_threads, " stalled in worker ", worker, " of ", num_workers);
          });
          for (int64_t i = 0; i < num_workers; ++i) {
            CHECK(runs[i] == 1, runs[i], " runs of worker ", i, " of ", num_workers);
          }
        }
      }
    }
  }
}
