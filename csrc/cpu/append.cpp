// SPDX-License-Identifier: BSD-3-Clause
#include "append.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <type_traits>
#include <vector>

#include "args/host_values.h"
#include "cpu/converting.h"
#include "cpu/parallel.h"
#include "cpu/quantise_row.h"

namespace tree_attention::cpu {
namespace {

constexpr int64_t kGrain = 32768;  // elements of a thread, as for merge_states

// `buffer` has room for a row.
template <typename From, typename To>
void append_row(const From* row, int64_t head_dim, float* buffer, To* out, float* scale) {
  if constexpr (std::is_same_v<From, To>) {
    std::memcpy(out, row, head_dim * sizeof(From));
  } else if constexpr (sizeof(To) == 1) {
    std::copy_n(row, head_dim, buffer);
    quantise_row(buffer, head_dim, out, scale);
  } else {
    for (int64_t d = 0; d < head_dim; ++d) out[d] = static_cast<float>(row[d]);
  }
}

template <typename From, typename To>
void append_rows(const AppendParams& p) {
  const int64_t widest = std::max<int64_t>({1, p.k.head_dim, p.v.head_dim});
  const int64_t elements = p.num_heads_kv * (p.k.head_dim + p.v.head_dim);  // of a token
  const int64_t grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, elements));
  const int64_t outer_size = p.page_size == 0 ? p.capacity : p.page_size;
  // Counted over all sequences where there are no pages; -1 is not kept.
  const auto slot_of = [&](int64_t i) {
    const int64_t batch = i / p.tokens, token = i % p.tokens;
    const int64_t slot = p.slots[batch * p.slots_stride[0] + token * p.slots_stride[1]];
    return slot < 0 || p.page_size > 0 ? slot : batch * p.capacity + slot;
  };
  // The last token of each slot, the only one that is written where several threads might write to
  // one row. Memory of slots that no token has is never touched.
  std::unique_ptr<int64_t[]> last;
  const int64_t num_tokens = p.batch * p.tokens;
  if (num_tokens > grain) {
    const int64_t num_slots = p.page_size == 0 ? p.batch * p.capacity : p.capacity;
    last = std::make_unique_for_overwrite<int64_t[]>(num_slots);
    for (int64_t i = 0; i < num_tokens; ++i) {
      if (const int64_t slot = slot_of(i); slot >= 0) last[slot] = i;
    }
  }
  parallel_for(0, num_tokens, grain, [&](int64_t begin, int64_t end) {
    std::vector<float> buffer(widest);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t batch = i / p.tokens, token = i % p.tokens;
      const int64_t slot = slot_of(i);
      if (slot < 0 || (last != nullptr && last[slot] != i)) continue;
      const int64_t outer = slot / outer_size, inner = slot % outer_size;
      for (const AppendTensor* x : {&p.k, &p.v}) {
        if (x->cache == nullptr) continue;
        for (int64_t head = 0; head < p.num_heads_kv; ++head) {
          const auto place = [&](const int64_t (&stride)[3]) {
            return outer * stride[0] + head * stride[1] + inner * stride[2];
          };
          append_row(static_cast<const From*>(x->rows) + batch * x->stride[0] +
                         head * x->stride[1] + token * x->stride[2],
                     x->head_dim, buffer.data(),
                     static_cast<To*>(x->cache) + place(x->cache_stride),
                     x->scale == nullptr ? nullptr : x->scale + place(x->scale_stride));
        }
      }
    }
  });
}

}  // namespace

void append_kv(const AppendParams& params) {
  check_slots(params);
  with_dtype(params.dtype, [&]<typename From>() {
    with_kv_dtype(params.cache_dtype, [&]<typename To>() {
      append_rows<typename Converting<From>::type, typename Converting<To>::type>(params);
    });
  });
}

}  // namespace tree_attention::cpu
