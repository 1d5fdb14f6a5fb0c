// SPDX-License-Identifier: BSD-3-Clause
//
// The functions of the module that are not tensor operators. Importing the module registers the
// operators of ops.cpp.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <tuple>
#include <utility>
#include <vector>

#include "args/checks.h"
#include "cpu/decode.h"
#include "cpu/digest.h"
#include "cpu/shared_memory.h"
#include "cpu/sockets.h"
#include "cpu/sum_rows.h"
#ifdef TREE_ATTENTION_WITH_CUDA
#include "cuda/decode/workspaces.h"
#endif

// python/tree_attention/_loader.py reads this text from the file before it loads the module: one
// that was built for another torch may not load at all.
[[gnu::used]] static const char kBuiltFor[] =
    "tree_attention is built for torch " TREE_ATTENTION_TORCH_VERSION
    " and runs with " TREE_ATTENTION_TORCH_RELEASES;

namespace {

using tree_attention::cpu::Message;
using tree_attention::cpu::SharedMemory;
using tree_attention::cpu::SharedRound;
using tree_attention::cpu::SharingRank;
using tree_attention::cpu::SocketRound;
using tree_attention::cpu::Sockets;

// (peer, address, number of bytes)
using Messages = std::vector<std::tuple<int, uintptr_t, size_t>>;

std::vector<Message> messages_at(const Messages& messages) {
  std::vector<Message> result;
  for (const auto& [peer, address, num_bytes] : messages) {
    result.push_back({peer, reinterpret_cast<char*>(address), num_bytes});
  }
  return result;
}

// Runs a round without the interpreter's lock, and lets the main thread handle signals in it.
template <typename Round>
void run_round(Round& round, double seconds, bool is_main_thread) {
  pybind11::gil_scoped_release without_interpreter;
  round.run(seconds, [=] {
    // Others handle no signals. They may outlive the interpreter, which ends the process if they
    // ask for its lock then.
    if (!is_main_thread) return;
    pybind11::gil_scoped_acquire with_interpreter;
    if (PyErr_CheckSignals() != 0) throw pybind11::error_already_set();
  });
}

void define_shared_memory(pybind11::module_& m) {
  pybind11::class_<SharedRound>(m, "SharedRound").def("run", &run_round<SharedRound>);
  pybind11::class_<SharedMemory, std::shared_ptr<SharedMemory>>(m, "SharedMemory")
      .def(pybind11::init([](int file, int own, const std::vector<std::pair<int, int>>& members) {
        std::vector<SharingRank> ranks;
        for (const auto& [rank, process] : members) ranks.push_back({rank, process});
        return std::make_shared<SharedMemory>(file, own, std::move(ranks));
      }))
      .def_static("num_bytes", &SharedMemory::num_bytes)
      .def("close", &SharedMemory::close)
      .def("round",
           [](std::shared_ptr<SharedMemory> memory, const Messages& receive, const Messages& send) {
             return SharedRound(std::move(memory), messages_at(receive), messages_at(send));
           });
}

void define_sockets(pybind11::module_& m) {
  pybind11::class_<SocketRound>(m, "SocketRound")
      .def("start", &SocketRound::start, pybind11::call_guard<pybind11::gil_scoped_release>())
      .def("run", &run_round<SocketRound>);
  pybind11::class_<Sockets, std::shared_ptr<Sockets>>(m, "Sockets")
      .def(pybind11::init<const std::vector<std::pair<int, int>>&>())
      .def("close", &Sockets::close)
      .def("round",
           [](std::shared_ptr<Sockets> sockets, const Messages& receive, const Messages& send) {
             return SocketRound(std::move(sockets), messages_at(receive), messages_at(send));
           });
}

// Adds every value of `x` in the order of indices, so that strides do not show. Rows that
// are not contiguous are packed in a small buffer, not copied as a whole.
void add_values(tree_attention::cpu::Digest& digest, const at::Tensor& x) {
  const bool has_runs = x.is_contiguous() || x.stride(-1) == 1 || x.size(-1) == 1;
  const at::Tensor rows = has_runs ? x : x.contiguous();
  const char* data = static_cast<const char*>(rows.const_data_ptr());
  if (rows.is_contiguous()) {
    digest.add(data, rows.nbytes());
    return;
  }
  const int64_t item = rows.element_size(), last = rows.dim() - 1;
  const size_t row_bytes = rows.size(last) * item;
  char buffer[tree_attention::cpu::Digest::kBlockBytes * 64];
  size_t used = 0;
  std::vector<int64_t> index(last, 0);
  for (int64_t left = rows.numel() / rows.size(last); left > 0; --left) {
    for (size_t done = 0; done < row_bytes;) {
      const size_t part = std::min(row_bytes - done, sizeof buffer - used);
      std::memcpy(buffer + used, data + done, part);
      done += part, used += part;
      if (used == sizeof buffer) {
        digest.add(buffer, used);
        used = 0;
      }
    }
    for (int64_t dim = last - 1; dim >= 0; --dim) {
      data += rows.stride(dim) * item;
      if (++index[dim] < rows.size(dim)) break;
      data -= rows.stride(dim) * item * rows.size(dim);
      index[dim] = 0;
    }
  }
  digest.add(buffer, used);
}

// Adds contiguous tensors of the CPU, of the shape and dtype of `out`.
void sum_rows(const std::vector<at::Tensor>& rows, const at::Tensor& out) {
  std::vector<const void*> data;
  for (const at::Tensor& row : rows) {
    TORCH_CHECK(
        row.is_contiguous() && row.numel() == out.numel() && row.scalar_type() == out.scalar_type(),
        "sum_rows: rows must be contiguous, of out's size and dtype, got ", row.sizes(), " of ",
        row.scalar_type());
    data.push_back(row.const_data_ptr());
  }
  const auto dtype = tree_attention::data_type(out.scalar_type(), "sum_rows", "out");
  pybind11::gil_scoped_release without_interpreter;
  tree_attention::cpu::sum_rows(data, out.numel(), dtype, out.mutable_data_ptr());
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  define_shared_memory(m);
  define_sockets(m);
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
#ifdef TREE_ATTENTION_WGMMA
    info["has_wgmma"] = true;
#else
    info["has_wgmma"] = false;
#endif
#else
    info["cuda_version"] = pybind11::none();
    info["cuda_architectures"] = pybind11::none();
    info["has_wgmma"] = false;
#endif
    return info;
  });
  // A digest of all values, whatever their strides, of tensors of the CPU with a dimension at
  // least.
  m.def("digest", [](const std::vector<at::Tensor>& tensors) {
    tree_attention::cpu::Digest digest;
    for (const at::Tensor& x : tensors) add_values(digest, x);
    return digest.value();
  });
  m.def("sum_rows", &sum_rows);
  m.def("cpu_instruction_set", &tree_attention::cpu::instruction_set);
  m.def("set_cpu_instruction_set", &tree_attention::cpu::set_instruction_set);

#ifdef TREE_ATTENTION_WITH_CUDA
  m.def("reset_workspaces", &tree_attention::cuda::reset_workspaces,
        pybind11::call_guard<pybind11::gil_scoped_release>());
#else
  m.def("reset_workspaces", [] {});
#endif
}
