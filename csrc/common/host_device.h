// SPDX-License-Identifier: BSD-3-Clause
#pragma once

// Functions shared by g++ and nvcc: the same text is compiled for threads, CTAs and ranks.
#if defined(__CUDACC__)
#define TREE_ATTENTION_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define TREE_ATTENTION_HOST_DEVICE inline
#endif
