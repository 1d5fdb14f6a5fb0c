// SPDX-License-Identifier: BSD-3-Clause
//
// PTX instructions of compute capability 9.0a, in the form of ptx.h: barriers in memory, copies of
// whole boxes, and products of four warps that read their operands from shared memory.
//
// A barrier is eight bytes of shared memory, aligned to them. Copies and products are in the
// asynchronous proxy: they see what threads have written to shared memory only after
// fence_proxy_async in those threads, and a barrier between these and the thread that issues them.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace tree_attention::cuda {

// 9.7.13.15.9 (mbarrier.init): phase 0, which ends after `count` arrivals and all bytes that were
// expected.
__device__ __forceinline__ void mbarrier_init(uint32_t barrier, uint32_t count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

// 9.7.13.4 (fence): copies see the barriers that this thread has initialised. Other threads see
// them after a barrier of threads that follows.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// 9.7.13.15.13 (mbarrier.arrive): what this thread read and wrote before is over for those who wait
// for the phase.
__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// mbarrier_arrive, before which the phase is made to wait for `bytes` more bytes of copies.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// 9.7.13.15.16 (mbarrier.try_wait): whether the phase of this parity, the current one or the one
// before it, has ended. It waits for a while, and is called until it has: the first phase has
// parity 0, and the one before that, which has ended from the beginning, parity 1.
__device__ __forceinline__ bool mbarrier_try_wait_parity(uint32_t barrier, uint32_t parity) {
  uint32_t ended;
  asm volatile(
      "{\n\t.reg .pred %%ended;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 %%ended, [%1], %2;\n"
      "selp.b32 %0, 1, 0, %%ended;\n\t}"
      : "=r"(ended)
      : "r"(barrier), "r"(parity)
      : "memory");
  return ended != 0;
}

// 9.7.13.4 (fence.proxy.async): what this thread wrote to shared memory before, copies and products
// that are issued after see.
__device__ __forceinline__ void fence_proxy_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// 9.7.9.25.5.2 (cp.async.bulk.tensor): copies the box of a tensor that begins at these coordinates,
// the innermost first, and tells `barrier`. Elements outside of the tensor become zero, and their
// bytes count, too. The destination is a multiple of 128 bytes, or of 1,024 with a swizzle of 128.
__device__ __forceinline__ void cp_async_bulk_tensor_4d(uint32_t destination,
                                                        const CUtensorMap* map, int32_t x,
                                                        int32_t y, int32_t z, int32_t w,
                                                        uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(destination),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(barrier)
      : "memory");
}

// 9.7.15.7.1 (wgmma.fence): before the first product, and between anything else that reads or
// writes its registers and a product.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

// 9.7.15.7.2 (wgmma.commit_group): makes one group of this warp's products since the last call.
__device__ __forceinline__ void wgmma_commit_group() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// 9.7.15.7.3 (wgmma.wait_group): waits until at most kPending of this warp's latest groups are
// incomplete. Before that nothing may touch the accumulators, the registers of a, or what a and b
// have in shared memory.
template <int kPending>
__device__ __forceinline__ void wgmma_wait_group() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// No instruction: the compiler, which takes products to be over when they are issued, must neither
// copy the accumulators before this point, after the wait, nor write them after it, before the
// fence.
template <int kCount>
__device__ __forceinline__ void wgmma_pin(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// 9.7.15.5.2 (wgmma.mma_async): d += a b, with a [64, 16] and b [16, n]; n is twice the number of a
// thread's accumulators: 16, 32 or 64. a and b are descriptors (matrix_descriptor.cuh), b of n rows
// of k; a of 64 rows of k or, where kTransposedA, of 16 rows of m. Warp w of the four has rows 16 w
// to 16 w + 15; with g = lane / 4 and t = lane % 4, d[4 j] is (g, 8 j + 2 t), d[4 j + 2]
// (g + 8, 8 j + 2 t), each with its neighbour.
#define TREE_ATTENTION_NAMES_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define TREE_ATTENTION_NAMES_16 TREE_ATTENTION_NAMES_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define TREE_ATTENTION_NAMES_32                                              \
  TREE_ATTENTION_NAMES_16                                                    \
  ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, " \
  "%30, %31"
#define TREE_ATTENTION_D_4(i) "+f"(d[i]), "+f"(d[(i) + 1]), "+f"(d[(i) + 2]), "+f"(d[(i) + 3])
#define TREE_ATTENTION_D_8(i) TREE_ATTENTION_D_4(i), TREE_ATTENTION_D_4((i) + 4)
#define TREE_ATTENTION_D_16(i) TREE_ATTENTION_D_8(i), TREE_ATTENTION_D_8((i) + 8)
#define TREE_ATTENTION_D_32(i) TREE_ATTENTION_D_16(i), TREE_ATTENTION_D_16((i) + 16)

// With `count` accumulators; `o0` to `o2` are the numbers of the operands that follow them.
#define TREE_ATTENTION_WGMMA(type, n, count, o0, o1, o2)                                        \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." #type "." #type                \
               " {" TREE_ATTENTION_NAMES_##count "}, %" #o0 ", %" #o1 ", 1, 1, 1, %" #o2 ", 0;" \
               : TREE_ATTENTION_D_##count(0)                                                    \
               : "l"(a), "l"(b), "n"(kTransposedA ? 1 : 0))
#define TREE_ATTENTION_WGMMA_OF(type)                                         \
  static_assert(kCount == 8 || kCount == 16 || kCount == 32);                 \
  if constexpr (kCount == 8) TREE_ATTENTION_WGMMA(type, 16, 8, 8, 9, 10);     \
  if constexpr (kCount == 16) TREE_ATTENTION_WGMMA(type, 32, 16, 16, 17, 18); \
  if constexpr (kCount == 32) TREE_ATTENTION_WGMMA(type, 64, 32, 32, 33, 34)

template <bool kTransposedA, int kCount>
__device__ __forceinline__ void wgmma_m64k16_bf16(float (&d)[kCount], uint64_t a, uint64_t b) {
  TREE_ATTENTION_WGMMA_OF(bf16);
}

template <bool kTransposedA, int kCount>
__device__ __forceinline__ void wgmma_m64k16_f16(float (&d)[kCount], uint64_t a, uint64_t b) {
  TREE_ATTENTION_WGMMA_OF(f16);
}
#undef TREE_ATTENTION_WGMMA
#undef TREE_ATTENTION_WGMMA_OF
#undef TREE_ATTENTION_NAMES_8
#undef TREE_ATTENTION_NAMES_16
#undef TREE_ATTENTION_NAMES_32
#undef TREE_ATTENTION_D_4
#undef TREE_ATTENTION_D_8
#undef TREE_ATTENTION_D_16
#undef TREE_ATTENTION_D_32

}  // namespace tree_attention::cuda
