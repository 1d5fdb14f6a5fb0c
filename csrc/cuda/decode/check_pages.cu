// SPDX-License-Identifier: BSD-3-Clause
#include "check_pages.cuh"

#include "common/rows.h"
#include "cuda/device.h"

namespace tree_attention::cuda {
namespace {

constexpr int kThreads = 32;
constexpr int kNoPage = 0x7fffffff;

// Grid: a block of one warp for each list of pages of each sequence.
__global__ void check_pages(const CheckPagesParams params) {
  const DecodeParams& p = params.decode;
  const int num_lists = num_page_lists(p);
  const int batch = blockIdx.x / num_lists, list = blockIdx.x % num_lists;
  const int32_t* ids =
      p.page_table + batch * p.page_table_stride[0] + list * p.page_table_stride[1];
  int bad = kNoPage;
  for (int token = 0; token < p.seqlen_q; ++token) {
    const KeyRange keys = key_range(p, batch, token);
    if (keys.empty()) continue;
    const int end = static_cast<int>((keys.end - 1) / p.page_size) + 1;
    for (int page = static_cast<int>(keys.begin / p.page_size) + threadIdx.x;
         page < end && page < bad; page += kThreads) {
      if (ids[page] < 0 || ids[page] >= p.num_pages) bad = page;
    }
  }
  for (int distance = kThreads / 2; distance > 0; distance /= 2) {
    const int other = __shfl_xor_sync(0xffffffff, bad, distance);
    bad = other < bad ? other : bad;
  }
  if (threadIdx.x == 0) {
    params.found[blockIdx.x] = bad == kNoPage ? BadPage{-1, 0} : BadPage{bad, ids[bad]};
  }
}

}  // namespace

cudaError_t launch_check_pages(const CheckPagesParams& params, cudaStream_t stream) {
  const unsigned num_blocks = params.decode.batch * num_page_lists(params.decode);
  if (num_blocks == 0) return cudaSuccess;
  return launch_kernel(check_pages, num_blocks, kThreads, 0, stream, params);
}

}  // namespace tree_attention::cuda
