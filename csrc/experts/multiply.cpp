// SPDX-License-Identifier: BSD-3-Clause
#include "experts/multiply.h"

#include <algorithm>
#include <vector>

#include "cpu/converting.h"
#include "cpu/parallel.h"
#include "experts/rows.h"

namespace tree_attention::cpu {
namespace {

// Rows of weights of a task of one thread.
constexpr int64_t kBlock = 32;

template <typename T>
class Products {
 public:
  explicit Products(const ExpertParams& params) : p_(params) {}

  // Rows [row, row + count) of one expert's weights.
  void multiply(int64_t expert, int64_t row, int64_t count) {
    const int64_t first = p_.begin[expert], from_row = expert * p_.outputs + row;
    read_scales(from_row, count);
    WeightRows w{p_.x_dtype,
                 p_.dtype,
                 static_cast<const char*>(p_.x) + first * p_.inputs * element_size(p_.x_dtype),
                 p_.begin[expert + 1] - first,
                 static_cast<const char*>(p_.weights) + from_row * row_bytes_,
                 count,
                 p_.inputs,
                 p_.group_size,
                 scales_.data(),
                 nullptr,
                 products_};
    workspace_.resize(std::max<size_t>(workspace_.size(), w.workspace_floats()));
    w.workspace = workspace_.data();
    multiply_rows(w);
    for (int64_t i = 0; i < count; ++i) {
      const float scale = p_.group_size == 0 ? scales_[i] : 1.0f;
      for (int64_t r = 0; r < w.rows; ++r) {
        out_[p_.rows[first + r] * p_.outputs + row + i] =
            static_cast<Value>(scale * products_[i * w.rows + r]);
      }
    }
  }

 private:
  using Value = typename Converting<T>::type;

  void read_scales(int64_t from_row, int64_t count) {
    scales_.resize(count * groups_, 1.0f);
    if (p_.scales == nullptr) return;
    const auto* const from = static_cast<const Value*>(p_.scales) + from_row * groups_;
    std::copy(from, from + count * groups_, scales_.begin());
  }

  const ExpertParams& p_;
  const int64_t groups_ = p_.group_size == 0 ? 1 : p_.inputs / p_.group_size;
  const int64_t row_bytes_ =
      p_.group_size == 0 ? p_.inputs * element_size(p_.dtype) : p_.inputs / 2;
  Value* out_ = static_cast<Value*>(p_.out);
  std::vector<float> workspace_, scales_;
  float products_[kBlock * WeightRows::kMaxRows];
};

}  // namespace

void multiply_experts(const ExpertParams& p) {
  std::vector<int64_t> hit;
  for (int64_t expert = 0; expert < p.num_experts; ++expert) {
    if (p.begin[expert + 1] > p.begin[expert]) hit.push_back(expert);
  }
  const int64_t blocks = (p.outputs + kBlock - 1) / kBlock;
  with_dtype(p.x_dtype, [&]<typename T>() {
    parallel_for(0, static_cast<int64_t>(hit.size()) * blocks, 1, [&](int64_t begin, int64_t end) {
      Products<T> products(p);
      for (int64_t task = begin; task < end; ++task) {
        const int64_t row = task % blocks * kBlock;
        products.multiply(hit[task / blocks], row, std::min(kBlock, p.outputs - row));
      }
    });
  });
}

}  // namespace tree_attention::cpu
