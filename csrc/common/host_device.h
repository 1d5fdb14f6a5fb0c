// SPDX-License-Identifier: BSD-3-Clause
#pragma once

// Functions shared by g++ and nvcc: the same text is compiled for threads, CTAs and ranks. They are
// always inlined: the linker would keep one copy of such a function, maybe one that was compiled
// for instructions that this machine lacks.
#if defined(__CUDACC__)
#define TREE_ATTENTION_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define TREE_ATTENTION_HOST_DEVICE __attribute__((always_inline)) inline
#endif
