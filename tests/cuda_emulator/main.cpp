// SPDX-License-Identifier: BSD-3-Clause
//
// Tests of the emulator: all of them, or the races that are named.
#include "run_tests.h"

void test_ptx();
void test_tensor_cores();
void test_ptx_instructions();
void test_async_copies();
void test_divergence();
void test_livelock();
void test_clusters();
void test_addresses();
void test_shared_memory();
void test_bank_conflicts();
void test_order_of_blocks();
void test_launch_errors();
void test_barriers_in_memory();
void test_named_barriers();
void test_box_copies();
void test_tensor_maps();
void test_products();
void test_synchronised();

void test_fixup_levels();
void test_fixup_lines();
void test_fixup_short();
void test_owners();
void test_merge_states();
void test_split_ranges();

void test_one_shot_worlds();
void test_one_shot_rows();
void test_one_shot_epochs();
void test_one_shot_short();
void test_one_shot_nan();
void test_one_shot_missing_rank();
void test_one_shot_abort();
void test_one_shot_sizes_that_differ();

void test_equal_splits();
void test_waiting_fixup();
void test_waiting_fixup_hangs();
void test_stamped();

void test_workspaces();
void test_kernel_loading();

void test_decode_shared_cases();
void test_decode_edges();
void test_decode_many_workers();
void test_decode_short();
void test_decode_clusters();
void test_decode_clusters_short();
void test_decode_columns_short();
void test_decode_short_kinds();
void test_decode_latents();
void test_decode_latents_short();
void test_decode_float16_latents_short();
void test_decode_128_short();
void test_decode_wide();
void test_decode_row_blocks();
void test_decode_plans_of_clusters();
void test_decode_plans_of_two_levels();
void test_decode_addresses();
void test_decode_addresses_short();
void test_decode_int8_short();
void test_decode_float8_short();
void test_decode_wgmma();
void test_decode_wgmma_short();
void test_decode_wgmma_rows();
void test_decode_wgmma_rows_short();
void test_decode_wgmma_pages();
void test_decode_wgmma_pages_short();
void test_decode_wgmma_tokens();
void test_decode_wgmma_again();
void test_decode_plans_of_wgmma();

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
            {"known_answers", test_ptx},
            {"ptx_instructions", test_ptx_instructions},
            {"decode_shared_cases", test_decode_shared_cases},
            {"decode_edges", test_decode_edges},
            {"decode_many_workers", test_decode_many_workers},
            {"decode_short", test_decode_short},
            {"decode_clusters", test_decode_clusters},
            {"decode_clusters_short", test_decode_clusters_short},
            {"decode_columns_short", test_decode_columns_short},
            {"decode_short_kinds", test_decode_short_kinds},
            {"decode_wide", test_decode_wide},
            {"decode_row_blocks", test_decode_row_blocks},
            {"decode_plans_of_clusters", test_decode_plans_of_clusters},
            {"decode_plans_of_two_levels", test_decode_plans_of_two_levels},
            {"decode_addresses", test_decode_addresses},
            {"decode_addresses_short", test_decode_addresses_short},
            {"decode_latents", test_decode_latents},
            {"decode_latents_short", test_decode_latents_short},
            {"decode_float16_latents_short", test_decode_float16_latents_short},
            {"decode_128_short", test_decode_128_short},
            {"decode_int8_short", test_decode_int8_short},
            {"decode_float8_short", test_decode_float8_short},
            {"decode_wgmma", test_decode_wgmma},
            {"decode_wgmma_short", test_decode_wgmma_short},
            {"decode_wgmma_rows", test_decode_wgmma_rows},
            {"decode_wgmma_rows_short", test_decode_wgmma_rows_short},
            {"decode_wgmma_pages", test_decode_wgmma_pages},
            {"decode_wgmma_pages_short", test_decode_wgmma_pages_short},
            {"decode_wgmma_tokens", test_decode_wgmma_tokens},
            {"decode_wgmma_again", test_decode_wgmma_again},
            {"decode_plans_of_wgmma", test_decode_plans_of_wgmma},
            {"fixup_short", test_fixup_short},
            {"split_ranges", test_split_ranges},
            {"one_shot_worlds", test_one_shot_worlds},
            {"one_shot_epochs", test_one_shot_epochs},
            {"one_shot_abort", test_one_shot_abort},
            {"one_shot_sizes_that_differ", test_one_shot_sizes_that_differ},
            {"one_shot_missing_rank", test_one_shot_missing_rank},
            {"one_shot_short", test_one_shot_short},
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
      {"tensor cores", test_tensor_cores},
      {"PTX instructions", test_ptx_instructions},
      {"bank conflicts", test_bank_conflicts},
      {"launch errors", test_launch_errors},
      {"tensor maps", test_tensor_maps},
      {"synchronised kernels", test_synchronised},
      {"workspaces", test_workspaces},
      {"kernel loading", test_kernel_loading},
      {"fix-up, short", test_fixup_short},
      {"owners", test_owners},
      {"split_ranges", test_split_ranges},
      {"one-shot, short", test_one_shot_short},
#if !defined(__SANITIZE_THREAD__)  // to which a thread of a kernel is expensive
      {"order of blocks", test_order_of_blocks},
      {"fix-up levels", test_fixup_levels},
      {"fix-up lines", test_fixup_lines},
      {"merge_states", test_merge_states},
      {"one-shot, worlds", test_one_shot_worlds},
      {"one-shot, rows", test_one_shot_rows},
      {"one-shot, epochs", test_one_shot_epochs},
      {"one-shot, NaN", test_one_shot_nan},
      {"one-shot, a missing rank", test_one_shot_missing_rank},
      {"one-shot, abort", test_one_shot_abort},
      {"one-shot, other sizes", test_one_shot_sizes_that_differ},
      {"equal splits", test_equal_splits},
      {"waiting fix-up", test_waiting_fixup},
      {"waiting fix-up, one block at a time", test_waiting_fixup_hangs},
      {"stamps", test_stamped},
      // Mistakes, which it would report as well.
      {"asynchronous copies", test_async_copies},
      {"divergence", test_divergence},
      {"clusters", test_clusters},
      {"livelock", test_livelock},
      {"addresses", test_addresses},
      {"shared memory", test_shared_memory},
      {"barriers in memory", test_barriers_in_memory},
      {"named barriers", test_named_barriers},
      {"copies of boxes", test_box_copies},
      {"products", test_products},
#endif
  });
}
