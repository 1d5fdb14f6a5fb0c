// SPDX-License-Identifier: BSD-3-Clause
#include <ATen/Parallel.h>

#include <cmath>
#include <limits>
#include <vector>

#include "check.h"
#include "cpu/merge.h"

using tree_attention::DataType;
using tree_attention::MergeParams;

void test_merge_states() {
  for (int threads : {1, 3}) {
    at::set_num_threads(threads);
    for (int64_t num_parts : {1, 2, 5, 64}) {
      for (int64_t head_dim : {1, 17, 128}) {
        const int64_t num_rows = 4096 / num_parts;
        std::vector<float> o_parts(num_parts * num_rows * head_dim);
        std::vector<float> lse_parts(num_parts * num_rows);
        for (size_t i = 0; i < lse_parts.size(); ++i) {
          const bool empty = i % 7 == 0;
          lse_parts[i] = empty ? -INFINITY : std::sin(static_cast<float>(i));
          for (int64_t d = 0; d < head_dim; ++d) o_parts[i * head_dim + d] = empty ? NAN : 1.0f;
        }
        std::vector<float> o(num_rows * head_dim, NAN), lse(num_rows, NAN);
        MergeParams params{};
        params.o_parts = o_parts.data();
        params.lse_parts = lse_parts.data();
        params.o = o.data();
        params.lse = lse.data();
        params.o_stride[0] = num_rows * head_dim;
        params.o_stride[1] = head_dim;
        params.lse_stride[0] = num_rows;
        params.lse_stride[1] = 1;
        params.num_parts = num_parts;
        params.num_rows = num_rows;
        params.head_dim = head_dim;
        params.dtype = params.out_dtype = DataType::kFloat32;
        tree_attention::cpu::merge_states(params);
        for (int64_t row = 0; row < num_rows; ++row) {
          double sum = 0.0;
          for (int64_t part = 0; part < num_parts; ++part) {
            sum += std::exp(static_cast<double>(lse_parts[part * num_rows + row]));
          }
          if (sum == 0.0) {
            CHECK(lse[row] == -INFINITY && o[row * head_dim] == 0.0f, "row ", row);
          } else {
            CHECK(std::abs(lse[row] - std::log(sum)) <= 1e-5, lse[row], " ", std::log(sum));
            CHECK(std::abs(o[row * head_dim + head_dim - 1] - 1.0f) <= 1e-5f, "row ", row);
          }
        }
      }
    }
  }
}
