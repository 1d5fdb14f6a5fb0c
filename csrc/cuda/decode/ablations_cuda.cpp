// SPDX-License-Identifier: BSD-3-Clause
//
// The ablations as operators with lean_decode's schema, in builds for benchmarks.
#include <torch/library.h>

#include "ablations.h"
#include "cuda/ops_cuda.h"
#include "operators.h"

namespace tree_attention {
namespace cuda {
namespace {

void check_ablation(const DecodeParams& p) {
  TORCH_CHECK(p.dtype == DataType::kBFloat16 && p.head_dim <= 128 && p.head_dim_v <= 128 &&
                  int64_t{p.group_size()} * p.seqlen_q <= 16,
              "lean_decode's ablations exist for bfloat16, a head_dim up to 128 and up to 16 query "
              "heads and tokens of a group");
}

void equal_splits(const DecodeParams& p) {
  check_ablation(p);
  if (p.batch > 0 && p.seqlen_q > 0) launch_planned(p, plan_equal_splits, launch_equal_splits);
}

void waiting_fixup(const DecodeParams& p) {
  check_ablation(p);
  if (p.batch > 0 && p.seqlen_q > 0) launch_planned(p, plan_lean_decode, launch_waiting_fixup);
}

}  // namespace
}  // namespace cuda

#define SCHEMA(name)                                                                            \
  name "(Tensor q, Tensor k, Tensor v, Tensor? key_ranges=None, *, float? softmax_scale=None, " \
       "float softcap=0.0, Tensor? alibi_slopes=None, Tensor? query_positions=None, "           \
       "int[] key_layout=[0, 1, 1], Tensor? page_table=None, ScalarType? out_dtype=None, "      \
       "int num_workers=0) -> (Tensor o, Tensor lse)"

TORCH_LIBRARY_FRAGMENT(tree_attention, m) {
  m.def(SCHEMA("lean_decode_equal_splits"));
  m.def(SCHEMA("lean_decode_waiting_fixup"));
}

TORCH_LIBRARY_IMPL(tree_attention, CUDA, m) {
  m.impl("lean_decode_equal_splits", LeanDecode<cuda::equal_splits>::run);
  m.impl("lean_decode_waiting_fixup", LeanDecode<cuda::waiting_fixup>::run);
}

}  // namespace tree_attention
