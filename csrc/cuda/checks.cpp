// SPDX-License-Identifier: BSD-3-Clause
#include "checks.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <limits>

#include "args/host_values.h"

namespace tree_attention::cuda {
namespace {

constexpr int kMaxHeadDim = 256;
constexpr int kMaxLatents = 576, kMaxLatentValues = 512;  // columns
constexpr int kAlignment = 16;                            // bytes
// The kernel counts keys in 32 bits, up to the end of the last tile.
constexpr int64_t kMaxKeys = std::numeric_limits<int32_t>::max() - 256;

// Whether the values are the first columns of their keys, in one memory. Where there are no keys,
// and so no memory, strides alone tell, which say nothing of values as wide as their keys.
bool has_values_in_keys(const DecodeParams& p) {
  const std::array<int64_t, 3> sizes = sizes_of_keys(p);
  if (p.k != p.v || p.head_dim_v > p.head_dim) return false;
  if (p.k == nullptr && p.head_dim_v == p.head_dim) return false;
  for (int axis = 0; axis < 3; ++axis) {
    if (sizes[axis] > 1 && p.k_stride[axis] != p.v_stride[axis]) return false;
  }
  return p.k != nullptr || p.k_stride[2] == p.v_stride[2];
}

void check_head_dim(const char* what, int32_t head_dim, const DecodeParams& p) {
  const bool has_8_bits = element_size(p.kv_dtype) == 1;
  const int multiple = has_8_bits ? kAlignment : 8;
  TORCH_CHECK_VALUE(head_dim % multiple == 0 && head_dim <= kMaxHeadDim, "lean_decode: ", what,
                    " must be a multiple of ", multiple, " up to ", kMaxHeadDim, " on CUDA",
                    has_8_bits ? " for keys of 8 bits" : "", ", got ", head_dim,
                    element_size(p.kv_dtype) == 2 && head_dim > kMaxHeadDim
                        ? "; more are taken where v is a view of the first columns of k"
                        : "");
}

// Latents: keys of more columns than others may have, whose first ones are their values.
void check_latents(const DecodeParams& p) {
  TORCH_CHECK_VALUE(p.dtype != DataType::kFloat32,
                    "lean_decode: q must be bfloat16 or float16 on CUDA for latents of more than ",
                    kMaxHeadDim, " columns, got float32");
  TORCH_CHECK_VALUE(p.kv_dtype == p.dtype,
                    "lean_decode: k must have the dtype of q on CUDA for latents of more than ",
                    kMaxHeadDim, " columns, got 8 bits");
  const auto check = [](const char* what, int32_t columns, int most) {
    TORCH_CHECK_VALUE(columns % 8 == 0 && columns <= most, "lean_decode: ", what,
                      " must be a multiple of 8 up to ", most,
                      " on CUDA for values that are the first columns of their keys, got ",
                      columns);
  };
  check("head_dim", p.head_dim, kMaxLatents);
  check("head_dim of v", p.head_dim_v, kMaxLatentValues);
}

void check_alignment(const char* argument, const void* data, const int64_t (&strides)[3],
                     const std::array<int64_t, 3>& sizes, int element_size) {
  const auto address = reinterpret_cast<uintptr_t>(data);
  TORCH_CHECK_VALUE(address % kAlignment == 0, "lean_decode: ", argument,
                    " must begin at a multiple of ", kAlignment, " bytes on CUDA, got one ",
                    address % kAlignment, " bytes beyond");
  for (int axis = 0; axis < 3; ++axis) {
    TORCH_CHECK_VALUE(sizes[axis] <= 1 || strides[axis] * element_size % kAlignment == 0,
                      "lean_decode: ", argument, " must have strides that are multiples of ",
                      kAlignment, " bytes on CUDA, got ", strides[axis], " elements of ",
                      element_size, " bytes on axis ", axis);
  }
}

}  // namespace

void check_supported(const DecodeParams& p) {
  TORCH_CHECK_VALUE(
      p.kv_dtype == p.dtype || p.dtype != DataType::kFloat32,
      "lean_decode: q must be bfloat16 or float16 on CUDA for keys of 8 bits, got float32");
  if (p.head_dim > kMaxHeadDim && has_values_in_keys(p)) {
    check_latents(p);
  } else {
    check_head_dim("head_dim", p.head_dim, p);
    check_head_dim("head_dim of v", p.head_dim_v, p);
  }
  TORCH_CHECK_VALUE(p.seqlen_k <= kMaxKeys, "lean_decode: seqlen_k must be at most ", kMaxKeys,
                    " on CUDA, got ", p.seqlen_k);
  TORCH_CHECK_VALUE(p.num_workers >= 0,
                    "lean_decode: num_workers must not be negative on CUDA, got ", p.num_workers);
  const std::array<int64_t, 3> k_sizes = sizes_of_keys(p);
  check_alignment("q", p.q, p.q_stride, {p.batch, p.num_heads_q, p.seqlen_q},
                  element_size(p.dtype));
  check_alignment("k", p.k, p.k_stride, k_sizes, element_size(p.kv_dtype));
  check_alignment("v", p.v, p.v_stride, k_sizes, element_size(p.kv_dtype));
}

void check_capability(const char* op, const char* device, int major, int minor) {
  TORCH_CHECK(major >= 8, op, ": the CUDA device must have compute capability 8.0 or higher, got ",
              major, ".", minor, " (", device, "); tensors on the CPU need no GPU");
}

void check_shared_memory(const DecodeParams& p, int32_t needed, int32_t available) {
  TORCH_CHECK_VALUE(needed <= available, "lean_decode: head_dim ",
                    std::max(p.head_dim, p.head_dim_v), " needs ", needed,
                    " bytes of shared memory per block, the CUDA device has ", available);
}

void check_number_of_tiles(const DecodeParams& p, int32_t row_tile, int32_t tile_keys,
                           int32_t num_workers) {
  const int64_t rows = int64_t{p.group_size()} * p.seqlen_q;
  const int64_t tiles = (p.seqlen_k + tile_keys - 1) / tile_keys + 1;
  const int64_t all = p.batch * ((rows + row_tile - 1) / row_tile) * tiles;
  TORCH_CHECK_VALUE(all <= INT32_MAX, "lean_decode: batch x blocks of ", row_tile,
                    " query rows x tiles of ", tile_keys, " keys must be below 2^31 on CUDA, got ",
                    all, "; attend to fewer sequences or query tokens in one call");
  const int64_t of_worker = all * p.num_heads_kv / num_workers;
  TORCH_CHECK_VALUE(of_worker <= INT32_MAX, "lean_decode: each of ", num_workers,
                    " workers must have less than 2^31 tiles of ", tile_keys, " keys on CUDA, got ",
                    of_worker, "; ask for more workers or attend to fewer kv heads in one call");
}

void check_found_pages(const DecodeParams& params, const BadPage* found) {
  const int32_t num_lists = num_page_lists(params);
  for (int64_t i = 0; i < int64_t{params.batch} * num_lists; ++i) {
    if (found[i].page >= 0) check_page_id(params, i / num_lists, found[i].page, found[i].id);
  }
}

}  // namespace tree_attention::cuda
