// SPDX-License-Identifier: BSD-3-Clause
//
// Tests of the emulator: all of them, or the races that are named.
#include "run_tests.h"

void test_ptx();
void test_async_copies();
void test_divergence();
void test_livelock();
void test_addresses();
void test_shared_memory();
void test_bank_conflicts();
void test_order_of_blocks();
void test_launch_errors();
void test_synchronised();

void race_no_barrier();
void race_relaxed();
void race_no_warp_barrier();
void race_early_refill();
void race_no_order();

int main(int argc, char** argv) {
  using tree_attention::testing::run_tests;
  if (argc > 1) {
    return run_tests(
        {
            {"race_no_barrier", race_no_barrier},
            {"race_relaxed", race_relaxed},
            {"race_no_warp_barrier", race_no_warp_barrier},
            {"race_early_refill", race_early_refill},
            {"race_no_order", race_no_order},
        },
        argc, argv);
  }
  return run_tests({
      {"known answers", test_ptx},
      {"bank conflicts", test_bank_conflicts},
      {"order of blocks", test_order_of_blocks},
      {"launch errors", test_launch_errors},
      {"synchronised kernels", test_synchronised},
#if !defined(__SANITIZE_THREAD__)  // which would report the mistakes as well
      {"asynchronous copies", test_async_copies},
      {"divergence", test_divergence},
      {"livelock", test_livelock},
      {"addresses", test_addresses},
      {"shared memory", test_shared_memory},
#endif
  });
}
