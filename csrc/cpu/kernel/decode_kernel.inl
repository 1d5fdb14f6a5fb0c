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

#include "decode_rows.inl"

#ifdef TREE_ATTENTION_AMX
#include "amx_8_bits.inl"

#include "amx_tiles.inl"

#include "amx_digits.inl"

#include "decode_amx.inl"

#include "prefill_tiles.inl"

#include "prefill_amx.inl"
#endif

int64_t max_rows([[maybe_unused]] const DecodeParams& p) {
#ifdef TREE_ATTENTION_AMX
  if (suits_prefill(p)) return kPrefillRows;
#endif
  return kMaxRows;
}

size_t workspace_bytes(const DecodeParams& p, int64_t num_rows) {
  const int64_t vector_rows = num_rows < kMaxRows ? num_rows : kMaxRows;
  size_t bytes = state_bytes(p, vector_rows);
#ifdef TREE_ATTENTION_AMX
  if (p.dtype == DataType::kBFloat16) bytes += Matrices::bytes(p, vector_rows);
  const size_t prefill_bytes = suits_prefill(p) ? Prefill::bytes(p, num_rows) : 0;
  if (prefill_bytes > bytes) bytes = prefill_bytes;
#endif
  return bytes;
}

void attend(const DecodeParams& p, const Rows& rows, KeyRange keys, void* workspace, float* o,
            float* lse) {
#ifdef TREE_ATTENTION_AMX
  if (suits_prefill(p)) {
    const auto run = [&]<typename T>() {
      if constexpr (kIsScaled<T> || __is_same(T, BFloat16)) {
        return PrefillCall<T>(p, rows, keys, workspace).run(o, lse);
      } else {
        return false;
      }
    };
    if (with_kv_dtype(p.kv_dtype, run)) return;
  }
#endif
  for (int64_t row = 0; row < rows.count; row += kMaxRows) {
    const int64_t count = row + kMaxRows < rows.count ? kMaxRows : rows.count - row;
    const Rows part{rows.batch, rows.head_kv, rows.begin + row, count};
    with_kv_dtype(p.kv_dtype, [&]<typename T>() {
      attend_rows<T>(p, part, keys, workspace, o + row * p.head_dim_v, lse + row);
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
