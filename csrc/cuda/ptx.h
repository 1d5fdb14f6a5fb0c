// SPDX-License-Identifier: BSD-3-Clause
//
// Every PTX instruction that the kernels use, one small function each, named after the instruction.
// Sections are those of the PTX ISA, version 9.0. The tests' emulator has a host version of each.
#pragma once

#include <cstdint>

namespace tree_attention::cuda {

// 5.1.8 (shared state space): the 32-bit address that cp.async and ldmatrix take.
__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// The block's dynamic shared memory, aligned for every use here.
__device__ __forceinline__ char* dynamic_shared_memory() {
  extern __shared__ __align__(1024) char memory[];
  return memory;
}

// 9.7.13.13 (griddepcontrol): waits until the grids ahead in the stream, which an early launch did
// not wait for, have ended and what they wrote can be read. Before compute capability 9.0, where no
// launch is early, it is nothing.
__device__ __forceinline__ void griddepcontrol_wait() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The same instruction: from here on, when all blocks have come here or ended, the next grid in the
// stream may begin, if it is launched early.
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// 9.7.13.1 (barrier): waits for `count` threads, whole warps, at one of the barriers 1 to 15 of the
// block; __syncthreads is barrier 0.
__device__ __forceinline__ void bar_sync(uint32_t barrier, uint32_t count) {
  asm volatile("barrier.cta.sync.aligned %0, %1;" ::"r"(barrier), "r"(count) : "memory");
}

// The same, and whether any of them gives true.
__device__ __forceinline__ bool bar_red_or(uint32_t barrier, uint32_t count, bool predicate) {
  uint32_t any;
  asm volatile(
      "{\n\t.reg .pred %%given;\n\t.reg .pred %%any;\n\tsetp.ne.b32 %%given, %3, 0;\n"
      "barrier.cta.red.or.aligned.pred %%any, %1, %2, %%given;\n"
      "selp.b32 %0, 1, 0, %%any;\n\t}"
      : "=r"(any)
      : "r"(barrier), "r"(count), "r"(static_cast<int>(predicate))
      : "memory");
  return any != 0;
}

// From compute capability 9.0 on the blocks of a cluster run side by side, wait for one another and
// read one another's shared memory.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr bool kHasClusters = false;
#else
constexpr bool kHasClusters = true;
#endif

// 9.7.13.3 (barrier.cluster): waits for all threads of the cluster. What one of them wrote before,
// to shared memory or to global memory, the others see after.
__device__ __forceinline__ void barrier_cluster() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// 9.7.9.23 (mapa): where block `rank` of the cluster has what this block has at a shared address.
__device__ __forceinline__ uint32_t mapa(uint32_t address, uint32_t rank) {
  uint32_t mapped;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
  return mapped;
}

// 9.7.9.8 (ld) of an address that mapa gave.
__device__ __forceinline__ float ld_shared_cluster(uint32_t address) {
  float x;
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(x) : "r"(address) : "memory");
  return x;
}

// The same of 16 bytes.
__device__ __forceinline__ void ld_shared_cluster_v4(float (&x)[4], uint32_t address) {
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
               : "r"(address)
               : "memory");
}

// 9.7.9.25.3.1 (cp.async): 16 bytes, of which the last 16 - num_bytes become zero; num_bytes is 0
// or 16. L2 only. `source` must be valid memory only where num_bytes is not zero. It has no cache
// policy: ptxas (12.8 to 13.3) may lose the descriptor that holds one, and the copy is an illegal
// instruction then (github.com/IST-DASLab/marlin/issues/44, triton-lang/triton#11660).
__device__ __forceinline__ void cp_async_16(uint32_t destination, const void* source,
                                            int num_bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(destination),
               "l"(source), "r"(num_bytes)
               : "memory");
}

// The same with 4 bytes; num_bytes is 0 or 4. Through L1.
__device__ __forceinline__ void cp_async_4(uint32_t destination, const void* source,
                                           int num_bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(destination), "l"(source),
               "r"(num_bytes)
               : "memory");
}

// 9.7.9.25.3.2: makes one group of this thread's copies since the last call.
__device__ __forceinline__ void cp_async_commit_group() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// 9.7.9.25.3.3: waits until at most kPending of this thread's latest groups are incomplete.
template <int kPending>
__device__ __forceinline__ void cp_async_wait_group() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// 9.7.14.5.15 (ldmatrix): four 8x8 matrices of 16-bit elements; lane 8 i + r gives the address of
// row r of matrix i. Lane l receives elements (l / 4, 2 (l % 4)) and its right neighbour.
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&matrices)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3])
               : "r"(row)
               : "memory");
}

// The same, each matrix transposed: lane l receives elements (2 (l % 4), l / 4) and the one below.
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&matrices)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3])
               : "r"(row)
               : "memory");
}

// 9.7.14.5.17 (movmatrix): transposes an 8x8 matrix of 16-bit elements, of which lane l gives
// elements (l / 4, 2 (l % 4)) and the right neighbour, and receives (2 (l % 4), l / 4) and the one
// below.
__device__ __forceinline__ uint32_t movmatrix_trans(uint32_t matrix) {
  uint32_t transposed;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(matrix));
  return transposed;
}

// 9.7.14.5.8 (mma.m16n8k16): d += a b with a [16, 16] in rows, b [16, 8] in columns. With
// g = lane / 4 and t = lane % 4: a0 (g, 2t), a1 (g + 8, 2t), a2 (g, 2t + 8), a3 (g + 8, 2t + 8);
// b0 (2t, g), b1 (2t + 8, g); d0, d1 (g, 2t), d2, d3 (g + 8, 2t); each pair with its neighbour.
__device__ __forceinline__ void mma_m16n8k16_bf16(float (&d)[4], const uint32_t (&a)[4],
                                                  uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void mma_m16n8k16_f16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                                 uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// 9.7.4.1 (add) and 9.7.4.4 (fma): a + b and a b + c of two pairs of 16-bit elements, rounded to
// nearest even; subnormal numbers are numbers.
__device__ __forceinline__ uint32_t add_f16x2(uint32_t a, uint32_t b) {
  uint32_t d;
  asm("add.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

__device__ __forceinline__ uint32_t fma_f16x2(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t d;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

// 9.7.9.7 (prmt): byte i of the result is byte kSelectors >> 4 i & 7 of the eight of b and a.
template <uint32_t kSelectors>
__device__ __forceinline__ uint32_t prmt(uint32_t a, uint32_t b) {
  uint32_t d;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "n"(kSelectors));
  return d;
}

// 9.7.9.4 (mov): the halves of a register, the lower one first. A shift would be an instruction of
// its own.
__device__ __forceinline__ void mov_halves(uint16_t (&halves)[2], uint32_t x) {
  asm("mov.b32 {%0, %1}, %2;" : "=h"(halves[0]), "=h"(halves[1]) : "r"(x));
}

// 9.7.3.20 (lg2): the logarithm to base 2; lg2(0) = -inf, also of a subnormal number.
__device__ __forceinline__ float lg2(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 9.7.3.21 (ex2): powers of 2; ex2(-inf) = 0.
__device__ __forceinline__ float ex2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 9.7.9.22 (cvt): two floats to a pair of 16-bit elements, rounded to nearest even, `low` in the
// lower half.
__device__ __forceinline__ uint32_t cvt_bf16x2(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

__device__ __forceinline__ uint32_t cvt_f16x2(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

__device__ __forceinline__ float cvt_f32_f16(uint16_t bits) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(bits));
  return y;
}

// From compute capability 8.9 on: two numbers of float8_e4m3fn, without an error. NaN stays NaN.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
constexpr bool kConvertsFloat8 = true;
#else
constexpr bool kConvertsFloat8 = false;
#endif
__device__ __forceinline__ uint32_t cvt_f16x2_e4m3x2(uint16_t bytes) {
  uint32_t pair;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(bytes));
  return pair;
}

// 9.7.13.5 (atom), with the memory order of a release of what came before and an acquire of what
// comes after: returns the old value; the new one is 0 if the old reached `limit`, else old + 1.
__device__ __forceinline__ uint32_t atomic_inc_acq_rel(uint32_t* counter, uint32_t limit) {
  uint32_t old;
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
               : "=r"(old)
               : "l"(counter), "r"(limit)
               : "memory");
  return old;
}

// 9.7.9.11 (st): 16 bytes in one access, of which the compiler makes four where it sees four
// floats.
__device__ __forceinline__ void st_global_v4(float* aligned, const float (&x)[4]) {
  asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(aligned), "f"(x[0]), "f"(x[1]),
               "f"(x[2]), "f"(x[3])
               : "memory");
}

// The same with 8 bytes.
__device__ __forceinline__ void st_global_v2(uint32_t* aligned, const uint32_t (&x)[2]) {
  asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(aligned), "r"(x[0]), "r"(x[1]) : "memory");
}

// 9.7.9.8 (ld.acquire), for a wait on another device or on the host.
__device__ __forceinline__ uint64_t load_acquire_system(const uint64_t* address) {
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
  return value;
}

// 9.7.9.11 (st.release): what came before, also in threads that met this one at a barrier, is seen
// by whoever acquires the value on any device or on the host.
__device__ __forceinline__ void store_release_system(uint64_t* address, uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}

// 10 (%globaltimer): nanoseconds, in steps of about a microsecond.
__device__ __forceinline__ uint64_t globaltimer() {
  uint64_t nanoseconds;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(nanoseconds));
  return nanoseconds;
}

}  // namespace tree_attention::cuda
