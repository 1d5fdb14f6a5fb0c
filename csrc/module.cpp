// SPDX-License-Identifier: BSD-3-Clause
//
// The functions of the module that are not tensor operators. Importing the module registers the
// operators of ops.cpp.
#include <ATen/Parallel.h>
#include <pybind11/pybind11.h>

#ifdef _OPENMP
#include <omp.h>
#endif

#include "cpu/decode.h"
#ifdef TREE_ATTENTION_WITH_CUDA
#include "cuda/decode/workspaces.h"
#endif

// python/tree_attention/_loader.py reads this text from the file before it loads the module: one
// that was built for another torch may not load at all.
[[gnu::used]] static const char kBuiltFor[] =
    "tree_attention is built for torch " TREE_ATTENTION_TORCH_VERSION;

PYBIND11_MODULE(_C, m) {
  m.def("build_info", [] {
    pybind11::dict info;
    info["torch_version"] = TREE_ATTENTION_TORCH_VERSION;
#if defined(__clang__)
    info["compiler"] = "clang " __clang_version__;
#else
    info["compiler"] = "g++ " __VERSION__;
#endif
#ifdef TREE_ATTENTION_WITH_CUDA
    info["cuda_version"] = TREE_ATTENTION_CUDA_VERSION;
    info["cuda_architectures"] = TREE_ATTENTION_CUDA_ARCHITECTURES;
#else
    info["cuda_version"] = pybind11::none();
    info["cuda_architectures"] = pybind11::none();
#endif
    return info;
  });
  m.def("cpu_instruction_set", &tree_attention::cpu::instruction_set);
  m.def("set_cpu_instruction_set", &tree_attention::cpu::set_instruction_set);

#ifdef TREE_ATTENTION_WITH_CUDA
  m.def("reset_workspaces", &tree_attention::cuda::reset_workspaces,
        pybind11::call_guard<pybind11::gil_scoped_release>());
#else
  m.def("reset_workspaces", [] {});
#endif
  // Parallel loops of the calling thread stay in it from now on. torch.set_num_threads would also
  // hold for every thread that starts later.
  m.def("use_one_thread", [] {
    at::get_num_threads();  // without it the thread's first loop would set the number anew
#ifdef _OPENMP
    omp_set_num_threads(1);
#endif
  });
}
