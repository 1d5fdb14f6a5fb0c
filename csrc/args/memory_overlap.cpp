// SPDX-License-Identifier: BSD-3-Clause
//
// Views of one tensor are nested: a step along an axis is longer than all that lies below it. Two
// of them meet in a place that at most two steps along each axis lead to, so that views of equal
// outer strides, such as the keys and values of pages, are told apart exactly. What is not nested,
// or of other strides and between each other, counts as overlapping. at::assert_no_overlap passes
// every pair in which one tensor has gaps.
#include "args/memory_overlap.h"

#include <c10/util/Exception.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <cstdlib>

namespace tree_attention {
namespace {

// `count` times what lies below, which takes `extent` bytes, at every multiple of `step`.
struct Axis {
  int64_t step, count, extent;

  int64_t end() const { return step * (count - 1) + extent; }
};

// By rising step. The first is of single bytes that follow one another; with `merge`, others that
// go on where one ends are one with it, too.
struct Axes {
  explicit Axes(const at::Tensor& tensor, bool merge = false)
      : axes{{1, tensor.element_size(), 1}} {
    c10::SmallVector<Axis, 8> own;
    for (int64_t axis = 0; axis < tensor.dim(); ++axis) {
      const int64_t step = tensor.stride(axis) * tensor.element_size();
      if (tensor.size(axis) < 2) continue;
      repeats = repeats || step == 0;
      if (step != 0) own.push_back({step, tensor.size(axis), 0});
    }
    std::sort(own.begin(), own.end(), [](const Axis& a, const Axis& b) { return a.step < b.step; });
    for (const Axis& axis : own) {
      Axis& below = axes.back();
      is_nested = is_nested && axis.step >= below.end();
      if ((merge || axes.size() == 1) && axis.step == below.step * below.count) {
        below.count *= axis.count;
      } else {
        axes.push_back({axis.step, axis.count, below.end()});
      }
    }
  }

  c10::SmallVector<Axis, 8> axes;
  bool is_nested = true;
  bool repeats = false;  // has several indices for each of its places
};

// Whether two ranges of bytes overlap; the second begins `distance` bytes after the first.
bool meet(int64_t first, int64_t second, int64_t distance) {
  return distance < first && -distance < second;
}

// Whether a byte of the first `a` axes of one is a byte of the first `b` axes of the other.
bool overlap(const Axes& first, size_t a, const Axes& second, size_t b, int64_t distance) {
  const Axis &x = first.axes[a - 1], &y = second.axes[b - 1];
  if (!meet(x.end(), y.end(), distance)) return false;
  if (a == 1 && b == 1) return true;
  const int64_t step = std::max(x.step, y.step);
  const bool takes_x = x.step == step, takes_y = y.step == step;
  const int64_t below_x = takes_x ? x.extent : x.end(), below_y = takes_y ? y.extent : y.end();
  if (below_x > step || below_y > step) return true;
  // What lies below is at distances of `step`, and meets where they are below it.
  const int64_t least = takes_x ? -(x.count - 1) : 0, most = takes_y ? y.count - 1 : 0;
  const int64_t near = -distance / step;
  for (int64_t i = std::max(least, near - 1); i <= std::min(most, near + 1); ++i) {
    if (overlap(first, a - takes_x, second, b - takes_y, distance + i * step)) return true;
  }
  return false;
}

bool overlaps_itself(const at::Tensor& tensor) {
  if (tensor.numel() < 2 || tensor.is_non_overlapping_and_dense()) return false;
  const Axes own(tensor);
  return own.repeats || !own.is_nested;
}

}  // namespace

ArgumentMemory::ArgumentMemory(const char* name, const at::Tensor& tensor)
    : name_(name), tensor_(&tensor) {
  if (tensor.numel() == 0) return;
  begin_ = reinterpret_cast<int64_t>(tensor.const_data_ptr());
  const auto sizes = tensor.sizes(), strides = tensor.strides();
  int64_t last = 0;
  for (size_t axis = 0; axis < sizes.size(); ++axis) last += (sizes[axis] - 1) * strides[axis];
  end_ = begin_ + (last + 1) * tensor.element_size();
}

ArgumentMemory::ArgumentMemory(const char* name, const std::optional<at::Tensor>& tensor)
    : name_(name) {
  if (tensor) *this = ArgumentMemory(name, *tensor);
}

bool ArgumentMemory::overlaps(const ArgumentMemory& other) const {
  if (begin_ >= other.end_ || other.begin_ >= end_) return false;
  for (const bool merge : {false, true}) {  // apart in one way is apart
    const Axes own(*tensor_, merge), others(*other.tensor_, merge);
    if (!own.is_nested || !others.is_nested) return true;
    const int64_t distance = other.begin_ - begin_;
    if (!overlap(own, own.axes.size(), others, others.axes.size(), distance)) return false;
  }
  return true;
}

void check_outputs(const char* op, std::initializer_list<ArgumentMemory> outputs,
                   std::initializer_list<ArgumentMemory> inputs) {
  for (const ArgumentMemory& output : outputs) {
    if (output.tensor_ == nullptr) continue;
    const at::Tensor& tensor = *output.tensor_;
    TORCH_CHECK_VALUE(
        !overlaps_itself(tensor), op, ": ", output.name_,
        " must not have two elements at one place in memory, or axes that interleave, got shape ",
        tensor.sizes(), " with strides ", tensor.strides(), "; give it memory of its own, as ",
        output.name_, ".clone() has");
    const auto check = [&](const ArgumentMemory& other) {
      TORCH_CHECK_VALUE(!output.overlaps(other), op, ": ", output.name_,
                        " must not share memory with ", other.name_,
                        ", or lie between its bytes with other strides, got strides ",
                        tensor.strides(), " and ", other.tensor_->strides(), " that begin ",
                        std::abs(other.begin_ - output.begin_), " bytes apart; give ", output.name_,
                        " memory of its own, as ", output.name_, ".clone() has");
    };
    for (const ArgumentMemory& input : inputs) check(input);
    for (const ArgumentMemory* other = outputs.begin(); other != &output; ++other) check(*other);
  }
}

}  // namespace tree_attention
