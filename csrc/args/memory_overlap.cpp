// SPDX-License-Identifier: BSD-3-Clause
//
// Whether elements of strided tensors meet is a question about sums of multiples of their strides,
// a bounded Diophantine equation, as in numpy.shares_memory. at::assert_no_overlap passes every
// pair of which one has gaps.
#include "args/memory_overlap.h"

#include <c10/util/Exception.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <cstdlib>
#include <numeric>

namespace tree_attention {
namespace {

// The search takes some dozens of steps for strides that are multiples of each other, as those of
// views of one tensor are. Where it takes more than these, 0.1 ms, tensors count as overlapping.
constexpr int kMaxSteps = 10000;

// 0, step, ..., (count - 1) * step
struct Multiples {
  int64_t step, count;
  int64_t rest = 0;     // the largest sum of those after it
  int64_t divisor = 0;  // of its step and of those after it

  int64_t largest() const { return step * (count - 1); }
};

using Terms = c10::SmallVector<Multiples, 16>;

void sort_by_falling_step(Terms& terms) {
  std::sort(terms.begin(), terms.end(),
            [](const Multiples& a, const Multiples& b) { return a.step > b.step; });
}

// Whether a sum of one multiple of each term, all with steps above 0, is in [low, high].
bool reaches(const Multiples* term, const Multiples* end, int64_t low, int64_t high, int& steps) {
  if (high < 0) return false;
  if (low <= 0) return true;
  if (term == end || high / term->divisor * term->divisor < low) return false;
  if (--steps < 0) return true;
  const int64_t first = std::max<int64_t>(0, low - term->rest + term->step - 1) / term->step;
  for (int64_t i = std::min(term->count - 1, high / term->step); i >= first; --i) {
    if (reaches(term + 1, end, low - i * term->step, high - i * term->step, steps)) return true;
  }
  return false;
}

bool reaches(Terms& terms, int64_t low, int64_t high) {
  sort_by_falling_step(terms);
  int64_t rest = 0, divisor = 0;
  for (auto term = terms.rbegin(); term != terms.rend(); ++term) {
    term->rest = rest;
    term->divisor = divisor = std::gcd(divisor, term->step);
    rest += term->largest();
  }
  int steps = kMaxSteps;
  return reaches(terms.begin(), terms.end(), low, high, steps);
}

Terms terms_of(const at::Tensor& tensor, int64_t stride_unit) {
  Terms terms;
  for (int64_t axis = 0; axis < tensor.dim(); ++axis) {
    if (tensor.size(axis) > 1) {
      terms.push_back({tensor.stride(axis) * stride_unit, tensor.size(axis)});
    }
  }
  sort_by_falling_step(terms);
  return terms;
}

bool overlaps_itself(const at::Tensor& tensor) {
  if (tensor.numel() < 2 || tensor.is_non_overlapping_and_dense()) return false;
  const Terms axes = terms_of(tensor, 1);
  if (axes.back().step == 0) return true;
  // Two indices of one place differ by some 1 <= d < count in a first axis, and by -count < d <
  // count in those after it. Sums are counted from the least of the latter, -rest.
  int64_t rest = 0;
  Terms terms;
  for (auto axis = axes.rbegin(); axis != axes.rend(); ++axis) {
    if (axis->step <= rest) {
      Terms differences = terms;
      differences.push_back({axis->step, axis->count - 1});
      if (reaches(differences, rest - axis->step, rest - axis->step)) return true;
    }
    rest += axis->largest();
    terms.push_back({axis->step, 2 * axis->count - 1});
  }
  return false;
}

// Blocks of bytes, at every sum of multiples of steps above their size.
struct Blocks {
  explicit Blocks(const at::Tensor& tensor)
      : terms(terms_of(tensor, tensor.element_size())), num_bytes(tensor.element_size()) {
    for (; !terms.empty() && terms.back().step <= num_bytes; terms.pop_back()) {
      num_bytes += terms.back().largest();
    }
  }

  Terms terms;
  int64_t num_bytes;
};

// Whether two tensors share bytes, of which the second begins `distance` bytes behind the first.
bool overlap(const at::Tensor& first, const at::Tensor& second, int64_t distance) {
  const Blocks a(first), b(second);
  // The distance of two blocks is that of the tensors, plus a sum of b's terms less one of a's.
  // The latter is counted from its largest, so that the steps of both are added.
  Terms terms = b.terms;
  for (const Multiples& term : a.terms) {
    distance -= term.largest();
    const auto same = std::find_if(terms.begin(), terms.end(),
                                   [&](const Multiples& x) { return x.step == term.step; });
    if (same == terms.end()) {
      terms.push_back(term);
    } else {
      same->count += term.count - 1;
    }
  }
  return reaches(terms, 1 - b.num_bytes - distance, a.num_bytes - 1 - distance);
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
  return begin_ < other.end_ && other.begin_ < end_ &&
         overlap(*tensor_, *other.tensor_, other.begin_ - begin_);
}

void check_outputs(const char* op, std::initializer_list<ArgumentMemory> outputs,
                   std::initializer_list<ArgumentMemory> inputs) {
  for (const ArgumentMemory& output : outputs) {
    if (output.tensor_ == nullptr) continue;
    const at::Tensor& tensor = *output.tensor_;
    TORCH_CHECK(!overlaps_itself(tensor), op, ": ", output.name_,
                " must not have two elements at one place in memory, got shape ", tensor.sizes(),
                " with strides ", tensor.strides(), "; give it memory of its own, as ",
                output.name_, ".clone() has");
    const auto check = [&](const ArgumentMemory& other) {
      TORCH_CHECK(!output.overlaps(other), op, ": ", output.name_, " must not share memory with ",
                  other.name_, ", got strides ", tensor.strides(), " and ",
                  other.tensor_->strides(), " that begin ", std::abs(other.begin_ - output.begin_),
                  " bytes apart; give ", output.name_, " memory of its own, as ", output.name_,
                  ".clone() has");
    };
    for (const ArgumentMemory& input : inputs) check(input);
    for (const ArgumentMemory* other = outputs.begin(); other != &output; ++other) check(*other);
  }
}

}  // namespace tree_attention
