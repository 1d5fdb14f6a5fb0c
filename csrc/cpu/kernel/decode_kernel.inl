// SPDX-License-Identifier: BSD-3-Clause
//
// The kernels of one instruction set, included inside its namespace after its vectors. Standard
// headers come before the compiler is told of the instruction set, and nothing here instantiates
// their templates: the linker keeps one copy of such a function, and it must run everywhere.
namespace {

#include "cpu/simd/simd_math.inl"

#include "decode_steps.inl"

#include "decode_products.inl"

#include "decode_softmax.inl"

#include "decode_state.inl"

#if defined(TREE_ATTENTION_AMX) || defined(TREE_ATTENTION_BF16)
#include "bf16_8_bits.inl"

#include "bf16_pairs.inl"
#endif

#ifdef TREE_ATTENTION_BF16
#include "bf16_few_rows.inl"
#else
template <typename T>
struct Dots;
#endif

#include "decode_rows.inl"

#if defined(TREE_ATTENTION_AMX) || defined(TREE_ATTENTION_BF16)
#include "many_rows.inl"
#endif

#ifdef TREE_ATTENTION_AMX
#include "amx_tiles.inl"

#include "amx_digits.inl"

#include "decode_amx.inl"

#include "prefill_tiles.inl"

#include "prefill_amx.inl"

template <typename T>
using ManyRowsOf = PrefillCall<T>;
using ManyRowsMemory = Prefill;
#endif

#ifdef TREE_ATTENTION_BF16
#include "bf16_many_rows.inl"

template <typename T>
using ManyRowsOf = ManyRowsCall<T>;
using ManyRowsMemory = ManyRows;
#endif

#if !defined(TREE_ATTENTION_AMX) && !defined(TREE_ATTENTION_BF16)
inline bool suits_many_rows(const DecodeParams&) { return false; }
#endif

int64_t max_rows(const DecodeParams& p) {
#if defined(TREE_ATTENTION_AMX) || defined(TREE_ATTENTION_BF16)
  if (suits_many_rows(p)) return kManyRows;
#endif
  return kMaxRows;
}

size_t workspace_bytes(const DecodeParams& p, int64_t num_rows) {
  const int64_t vector_rows = num_rows < kMaxRows ? num_rows : kMaxRows;
  size_t bytes = state_bytes(p, vector_rows);
#ifdef TREE_ATTENTION_AMX
  if (p.dtype == DataType::kBFloat16) bytes += Matrices::bytes(p, vector_rows);
#endif
#if defined(TREE_ATTENTION_AMX) || defined(TREE_ATTENTION_BF16)
  const size_t many_bytes = suits_many_rows(p) ? ManyRowsMemory::bytes(p, num_rows) : 0;
  if (many_bytes > bytes) bytes = many_bytes;
#endif
  return bytes;
}

// False where the output has too few rows for it, or where it could not be exact.
bool attend_many_rows(const DecodeParams& p, const Rows& rows, KeyRange keys, void* workspace,
                      float* o, float* lse) {
  if (!suits_many_rows(p)) return false;
#if defined(TREE_ATTENTION_AMX) || defined(TREE_ATTENTION_BF16)
  return with_kv_dtype(p.kv_dtype, [&]<typename T>() {
    if constexpr (kIsScaled<T> || __is_same(T, BFloat16)) {
      return ManyRowsOf<T>(p, rows, keys, workspace).run(o, lse);
    } else {
      return false;
    }
  });
#else
  return false;
#endif
}

// Attention of up to kMaxRows rows.
template <typename T>
void attend_few_rows(const DecodeParams& p, const Rows& rows, KeyRange keys, void* workspace,
                     float* o, float* lse) {
#ifdef TREE_ATTENTION_BF16
  if constexpr (kIsScaled<T> || __is_same(T, BFloat16)) {
    if (p.dtype == DataType::kBFloat16) {
      attend_rows<T, true>(p, rows, keys, workspace, o, lse);
      // A NaN may come from an infinite value and a weight whose second term is 0.
      if (!weights_need_two_terms(p) || !has_nan(o, rows.count * p.head_dim_v)) return;
    }
  }
  avx512_kernels.attend(p, rows, keys, workspace, o, lse);
#else
  attend_rows<T, false>(p, rows, keys, workspace, o, lse);
#endif
}

void attend(const DecodeParams& p, const Rows& rows, KeyRange keys, void* workspace, float* o,
            float* lse) {
  if (attend_many_rows(p, rows, keys, workspace, o, lse)) return;
  for (int64_t row = 0; row < rows.count; row += kMaxRows) {
    const int64_t count = row + kMaxRows < rows.count ? kMaxRows : rows.count - row;
    const Rows part{rows.batch, rows.head_kv, rows.begin + row, count};
    with_kv_dtype(p.kv_dtype, [&]<typename T>() {
      attend_few_rows<T>(p, part, keys, workspace, o + row * p.head_dim_v, lse + row);
    });
  }
}

template <typename T>
inline void store_rows(const DecodeParams& p, const Rows& rows, const float* o, const float* lse) {
  for (int64_t row = 0; row < rows.count; ++row, o += p.head_dim_v) {
    const auto [token, head] = place_of_row(p, rows, row);
    T* out = static_cast<T*>(p.o) + rows.batch * p.o_stride[0] + head * p.o_stride[1] +
             token * p.o_stride[2];
    int64_t d = 0;
    for (; d + kLanes <= p.head_dim_v; d += kLanes) store_rounded(out + d, load(o + d));
    if (d < p.head_dim_v) {
      const int64_t rest = p.head_dim_v - d;
      float tail[kLanes] = {};
      T rounded[kLanes];
      __builtin_memcpy(tail, o + d, rest * sizeof(float));
      store_rounded(rounded, load(tail));
      __builtin_memcpy(out + d, rounded, rest * sizeof(T));
    }
    p.lse[rows.batch * p.lse_stride[0] + head * p.lse_stride[1] + token * p.lse_stride[2]] =
        lse[row];
  }
}

void store_output(const DecodeParams& p, const Rows& rows, const float* o, const float* lse) {
  with_dtype(p.out_dtype, [&]<typename T>() { store_rows<T>(p, rows, o, lse); });
}

constexpr Kernels kKernels{kName, max_rows, workspace_bytes, attend, store_output};

}  // namespace
