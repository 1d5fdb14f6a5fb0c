// SPDX-License-Identifier: BSD-3-Clause
//
// Stands for the toolkit's header where kernels run on the emulated device.
#pragma once

enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1 };
using cudaStream_t = struct CUstream_st*;
