// SPDX-License-Identifier: BSD-3-Clause
//
// What a kernel may use of the machine. Kernel headers include this and csrc/common, nothing else,
// so that the same text also runs on the host, where the tests' emulator takes the place of nvcc.
//
// Kernels use the functions of ptx.h and these CUDA built-ins: threadIdx.x, blockIdx.x,
// gridDim.x, __clz, __syncthreads, __syncwarp, __shfl_sync, __shfl_up_sync, __shfl_xor_sync,
// __any_sync,
// __threadfence, and of <cmath> what device code has. Every thread of a block reaches every
// barrier; warp functions are called by whole warps.
#pragma once

#if defined(__CUDACC__)
#include "launch_kernel.h"
#include "ptx.h"
#include "ptx_hopper.h"
#else
#include "emulator.h"
#endif
