// SPDX-License-Identifier: BSD-3-Clause
//
// The known answers on a GPU, from nvcc's compilation of ptx.h.
#include <cstdio>
#include <exception>

#include "ptx_known_answers.cuh"

namespace {

// A few kilobytes in all, and freed with the process.
void* allocate(size_t bytes) {
  void* memory;
  CHECK(cudaMallocManaged(&memory, bytes) == cudaSuccess, bytes, " bytes");
  return memory;
}

void synchronize() {
  const cudaError_t error = cudaDeviceSynchronize();
  CHECK(error == cudaSuccess, cudaGetErrorString(error));
}

}  // namespace

int main() {
  try {
    tree_attention::testing::test_known_answers({allocate, synchronize});
  } catch (const std::exception& error) {
    std::puts(error.what());
    return 1;
  }
  std::puts("all answers are right");
  return 0;
}
