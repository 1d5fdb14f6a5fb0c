// SPDX-License-Identifier: BSD-3-Clause
#include "check.h"
#include "common/rows.h"
#include "cuda/decode/divisor.h"

using namespace tree_attention;

// Rows of a token are neighbours, in the order of the query heads of their group; the two kinds of
// divisor agree.
void test_place_of_row() {
  for (const int group_size : {1, 3, 8}) {
    DecodeParams params{};
    params.num_heads_kv = 4;
    params.num_heads_q = 4 * group_size;
    const cuda::Divisor divisor = cuda::Divisor::of(group_size);
    for (int head_kv = 0; head_kv < 4; ++head_kv) {
      int packed = 0;
      for (int token = 0; token < 5; ++token) {
        for (int head = head_kv * group_size; head < (head_kv + 1) * group_size; ++head, ++packed) {
          const RowPlace<int> on_cuda = place_of_row(head_kv, packed, divisor);
          CHECK(on_cuda.token == token && on_cuda.head == head, packed, " of ", head_kv);
          const Rows rows{0, head_kv, packed / 2, packed + 1};  // any block that holds the row
          const RowPlace<int64_t> place = place_of_row(params, rows, packed - packed / 2);
          CHECK(place.token == token && place.head == head, packed, " of ", head_kv);
        }
      }
    }
  }
}
