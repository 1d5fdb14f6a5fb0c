// SPDX-License-Identifier: BSD-3-Clause
//
// The C++ code without torch, run under sanitizers by scripts/sanitize.sh. What the operators
// compute is tested from Python; here memory, arithmetic and synchronisation are watched.
#include "run_tests.h"

void test_partition();
void test_contributors();
void test_line_with_overhead();
void test_digest();
void test_sum_rows();
void test_divisor();
void test_dtype();
void test_place_of_row();
void test_fixup();
void test_fixup_levels();
void test_fixup_threads();
void test_merge();
void test_canonical_order();
void test_merge_states();
void test_experts();
void test_index();
void test_merge_topk();
void test_work_queue();
void test_amx_products();
void test_amx_exceptions();
void test_amx_fetching();
void test_lean_decode();
void test_many_workers();
void test_page_out_of_range();
void test_concurrent_calls();
void test_shared_memory();
void test_closed_shared_memory();
void test_sockets();
void test_lost_sockets();

int main() {
  return tree_attention::testing::run_tests({
      {"partition", test_partition},
      {"contributors", test_contributors},
      {"line with overhead", test_line_with_overhead},
      {"digest", test_digest},
      {"sum_rows", test_sum_rows},
      {"divisor", test_divisor},
      {"dtype", test_dtype},
      {"place of row", test_place_of_row},
      {"fix-up", test_fixup},
      {"fix-up levels", test_fixup_levels},
      {"fix-up threads", test_fixup_threads},
      {"merge", test_merge},
      {"canonical order", test_canonical_order},
      {"merge_states", test_merge_states},
      {"experts", test_experts},
      {"index", test_index},
      {"merge_topk", test_merge_topk},
      {"work queue", test_work_queue},
      {"products of emulated AMX", test_amx_products},
      {"exceptions of emulated AMX", test_amx_exceptions},
      {"fetching of emulated AMX", test_amx_fetching},
      {"lean_decode", test_lean_decode},
      {"many workers", test_many_workers},
      {"page out of range", test_page_out_of_range},
      {"concurrent calls", test_concurrent_calls},
      {"shared memory", test_shared_memory},
      {"closed shared memory", test_closed_shared_memory},
      {"sockets", test_sockets},
      {"lost sockets", test_lost_sockets},
  });
}
