// SPDX-License-Identifier: BSD-3-Clause
#include "decode_case.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>

#include "check.h"
#include "common/quantise.h"

namespace tree_attention::testing {
namespace {

#if defined(__aarch64__)
using Half = __fp16;  // of g++ before 13, which does not know the other name
#else
using Half = _Float16;
#endif

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr KeyLayout kLayout{3, 16, 48};  // rank 0 of 3, block 16, behind 3 other keys

// batch, kv heads, group, seqlen_q, seqlen_k, head_dim, head_dim_v, dtype, page, alibi, cap, ranges
const std::vector<Shape> kShapes = {
    {1, 1, 1, 1, 1, 1, 1, DataType::kFloat32},
    {1, 1, 4, 1, 0, 64, 64, DataType::kBFloat16},
    {1, 1, 4, 1, 63, 64, 64, DataType::kBFloat16},
    {1, 2, 4, 1, 65, 80, 80, DataType::kFloat16},
    {2, 2, 4, 1, 200, 64, 128, DataType::kBFloat16},
    {2, 1, 8, 1, 700, 128, 128, DataType::kBFloat16},
    {1, 2, 3, 1, 129, 20, 33, DataType::kFloat32},
    {3, 2, 4, 1, 300, 64, 64, DataType::kFloat16, 0, false, 0.0f, true},
    {2, 2, 4, 5, 150, 64, 64, DataType::kBFloat16, 0, false, 0.0f, true},
    {2, 1, 3, 7, 150, 40, 24, DataType::kFloat32, 0, true, 5.0f, true},
    {2, 2, 2, 2, 96, 64, 64, DataType::kBFloat16, 16, false, 0.0f, true},
    {2, 2, 2, 1, 96, 48, 48, DataType::kFloat32, 24, true, 0.0f, false},
    {1, 1, 4, 64, 160, 64, 64, DataType::kBFloat16, 0, false, 0.0f, true},
    {1, 2, 2, 70, 140, 32, 32, DataType::kFloat32, 0, false, 0.0f, true},
    {1, 1, 4, 40, 330, 128, 128, DataType::kBFloat16},
};

int64_t key_position(int key) {
  return kLayout.first + key / kLayout.block * kLayout.stride + key % kLayout.block;
}

void store(std::vector<unsigned char>& storage, int64_t index, DataType dtype, double value) {
  const float rounded = static_cast<float>(value);
  unsigned char* out = storage.data() + index * element_size(dtype);
  if (dtype == DataType::kInt8) {
    if (!std::isnan(rounded)) *out = static_cast<unsigned char>(quantised<Int8>(rounded).value);
  } else if (dtype == DataType::kFloat8) {
    *out = quantised<Float8>(rounded).bits;
  } else if (dtype == DataType::kFloat32) {
    std::memcpy(out, &rounded, 4);
  } else if (dtype == DataType::kFloat16) {
    const Half half = static_cast<Half>(rounded);
    std::memcpy(out, &half, 2);
  } else {
    uint32_t bits;
    std::memcpy(&bits, &rounded, 4);
    const uint16_t upper = bits >> 16;
    std::memcpy(out, &upper, 2);
  }
}

double value(const std::vector<unsigned char>& storage, int64_t index, DataType dtype) {
  const unsigned char* in = storage.data() + index * element_size(dtype);
  if (dtype == DataType::kInt8) return static_cast<int8_t>(*in);
  if (dtype == DataType::kFloat8) {
    const int exponent = *in >> 3 & 15, fraction = *in & 7;
    const double magnitude = exponent == 0        ? fraction / 512.0
                             : (*in & 127) == 127 ? kNan
                                                  : std::ldexp(1 + fraction / 8.0, exponent - 7);
    return *in >> 7 ? -magnitude : magnitude;
  }
  if (dtype == DataType::kFloat32) {
    float value;
    std::memcpy(&value, in, 4);
    return value;
  }
  uint16_t half_bits;
  std::memcpy(&half_bits, in, 2);
  if (dtype == DataType::kFloat16) {
    Half value;
    std::memcpy(&value, &half_bits, 2);
    return static_cast<float>(value);
  }
  const uint32_t bits = static_cast<uint32_t>(half_bits) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

}  // namespace

const std::vector<Shape>& shapes() { return kShapes; }

DecodeCase::DecodeCase(const Shape& shape, int seed) : shape_(shape) {
  const Shape& s = shape_;
  std::mt19937 random(seed);
  std::normal_distribution<double> normal;
  const auto fill = [&](Bytes& storage, int64_t rows, int dim, DataType dtype) {
    storage = Bytes(rows * (dim + s.gap) * element_size(dtype));
    const double size = s.kv_dtype == dtype ? 20.0 : 1.0;
    for (int64_t i = 0; i < rows * (dim + s.gap); ++i) {
      store(storage, i, dtype, i % (dim + s.gap) < dim ? size * normal(random) : kNan);
    }
  };
  const int64_t pages = s.page_size ? (s.seqlen_k + s.page_size - 1) / s.page_size : 0;
  const int64_t pages_in_use = s.batch * pages;
  const int64_t rows =
      s.heads_kv * (s.page_size ? (pages_in_use + 1) * s.page_size : s.batch * s.seqlen_k);
  fill(q_, int64_t{s.batch} * s.heads_kv * s.group_size * s.seqlen_q, s.head_dim, s.dtype);
  fill(k_, rows, s.head_dim, s.cached());
  if (!s.latents) fill(v_, rows, s.head_dim_v, s.cached());
  if (s.kv_dtype) {
    for (std::vector<float>* scales : {&k_scale_, &v_scale_}) {
      for (int64_t i = 0; i < rows; ++i) {
        scales->push_back(
            static_cast<float>(random() % 5 == 0 ? -0.02 : 0.06 / (1 + random() % 3)));
      }
    }
  }

  if (s.page_size) {
    for (int64_t i = 0; i < pages_in_use; ++i) page_table_.push_back(pages_in_use - i);
  }
  if (s.ranges) {
    for (int i = 0; i < s.batch * s.seqlen_q; ++i) {
      const int32_t begin = static_cast<int32_t>(random() % (s.seqlen_k + 1)) / 2;
      const int32_t length = static_cast<int32_t>(random() % (s.seqlen_k + 2));
      ranges_.push_back(i % 5 == 4 ? -3 : begin);  // clamped
      ranges_.push_back(i % 3 == 2 ? begin : begin + length);
    }
  }
  for (int i = 0; s.window > 0 && i < s.batch * s.seqlen_q; ++i) {
    const int32_t end = s.seqlen_k - s.seqlen_q + 1 + i % s.seqlen_q;
    ranges_.push_back(end - s.window);
    ranges_.push_back(end);
  }
  if (s.alibi) {
    for (int i = 0; i < s.heads_kv * s.group_size; ++i) slopes_.push_back(0.01f * (i + 1));
    for (int i = 0; i < s.batch * s.seqlen_q; ++i) positions_.push_back(3 * s.seqlen_k + i);
  }

  const bool has_ranges = !ranges_.empty();
  std::vector<bool> seen(rows, false);
  for (int batch = 0; batch < s.batch; ++batch) {
    for (int token = 0; token < s.seqlen_q; ++token) {
      const size_t pair = 2 * (static_cast<size_t>(batch) * s.seqlen_q + token);
      const int begin = has_ranges ? std::max(0, ranges_[pair]) : 0;
      const int end = has_ranges ? std::min(s.seqlen_k, ranges_[pair + 1]) : s.seqlen_k;
      for (int head = 0; head < s.heads_kv; ++head) {
        for (int key = begin; key < end; ++key) seen[row_of_key(batch, head, key)] = true;
      }
    }
  }
  const int64_t k_stride = s.head_dim + s.gap;
  for (int64_t row = 0; row < rows; ++row) {
    if (seen[row]) continue;
    for (int d = 0; d < s.head_dim; ++d) store(k_, row * k_stride + d, s.cached(), kNan);
    for (int d = 0; !s.latents && d < s.head_dim_v; ++d) {
      store(v_, row * value_stride() + d, s.cached(), kNan);
    }
    if (s.kv_dtype) k_scale_[scale_of_row(row)] = v_scale_[scale_of_row(row)] = NAN;
  }
  if (s.nan) {
    store(k_, row_of_key(0, 0, 7) * k_stride + 5, s.cached(), kNan);
    v_scale_[scale_of_row(row_of_key(0, 0, 11))] = NAN;
  }
  compute_reference();
}

// Row of K and V in their storage: [batch, head, key], or [page, head, slot].
int64_t DecodeCase::row_of_key(int batch, int head, int key) const {
  const Shape& s = shape_;
  if (s.page_size == 0) return (int64_t{batch} * s.heads_kv + head) * s.seqlen_k + key;
  const int pages = (s.seqlen_k + s.page_size - 1) / s.page_size;
  const int64_t page = page_table_[batch * pages + key / s.page_size];
  return (page * s.heads_kv + head) * s.page_size + key % s.page_size;
}

// The place of a row's scale, of which the heads are neighbours.
int64_t DecodeCase::scale_of_row(int64_t row) const {
  const int64_t tokens = shape_.page_size ? shape_.page_size : shape_.seqlen_k;
  const int64_t outer = row / tokens / shape_.heads_kv, head = row / tokens % shape_.heads_kv;
  return (outer * tokens + row % tokens) * shape_.heads_kv + head;
}

// Elements from a value to the next.
int64_t DecodeCase::value_stride() const {
  return (shape_.latents ? shape_.head_dim : shape_.head_dim_v) + shape_.gap;
}

void DecodeCase::compute_reference() {
  const Shape& s = shape_;
  const int heads_q = s.heads_kv * s.group_size;
  const int64_t k_stride = s.head_dim + s.gap;
  const Bytes& values = s.latents ? k_ : v_;
  const bool has_ranges = !ranges_.empty();
  for (int batch = 0; batch < s.batch; ++batch) {
    for (int head = 0; head < heads_q; ++head) {
      for (int token = 0; token < s.seqlen_q; ++token) {
        const int64_t query = (int64_t{batch} * heads_q + head) * s.seqlen_q + token;
        const size_t pair = 2 * (static_cast<size_t>(batch) * s.seqlen_q + token);
        const int begin = has_ranges ? std::max(0, ranges_[pair]) : 0;
        const int end = has_ranges ? std::min(s.seqlen_k, ranges_[pair + 1]) : s.seqlen_k;
        double sum = 0.0;
        std::vector<double> o(s.head_dim_v, 0.0);
        for (int key = begin; key < end; ++key) {
          const int64_t row = row_of_key(batch, head / s.group_size, key);
          double score = 0.0;
          for (int d = 0; d < s.head_dim; ++d) {
            score += value(q_, query * k_stride + d, s.dtype) *
                     value(k_, row * k_stride + d, s.cached());
          }
          const int64_t scale = scale_of_row(row);
          score *= (s.kv_dtype ? k_scale_[scale] : 1.0) / std::sqrt(s.head_dim);
          if (s.softcap != 0.0f) score = s.softcap * std::tanh(score / s.softcap);
          if (s.alibi) {
            score -= slopes_[head] * (positions_[batch * s.seqlen_q + token] - key_position(key));
          }
          const double weight = std::exp(score);
          sum += weight;
          for (int d = 0; d < s.head_dim_v; ++d) {
            o[d] += weight * (s.kv_dtype ? v_scale_[scale] : 1.0) *
                    value(values, row * value_stride() + d, s.cached());
          }
        }
        for (double& x : o) x = sum == 0.0 ? 0.0 : x / sum;
        o_reference_.insert(o_reference_.end(), o.begin(), o.end());
        lse_reference_.push_back(std::log(sum));
      }
    }
  }
}

DecodeParams DecodeCase::params(int num_workers) {
  const Shape& s = shape_;
  const int heads_q = s.heads_kv * s.group_size;
  o_.assign(o_reference_.size(), NAN);
  lse_.assign(lse_reference_.size(), NAN);
  const auto set = [](int64_t* stride, int64_t tokens, int64_t heads, int64_t width) {
    stride[0] = heads * tokens * width;
    stride[1] = tokens * width;
    stride[2] = width;
  };
  const int tokens_k = s.page_size ? s.page_size : s.seqlen_k;
  DecodeParams p{};
  p.q = q_.data();
  p.k = k_.data();
  p.v = s.latents ? k_.data() : v_.data();
  p.o = o_.data();
  p.lse = lse_.data();
  set(p.q_stride, s.seqlen_q, heads_q, s.head_dim + s.gap);
  set(p.k_stride, tokens_k, s.heads_kv, s.head_dim + s.gap);
  set(p.v_stride, tokens_k, s.heads_kv, value_stride());
  set(p.o_stride, s.seqlen_q, heads_q, s.head_dim_v);
  set(p.lse_stride, s.seqlen_q, heads_q, 1);
  if (s.kv_dtype) {
    p.k_scale = k_scale_.data();
    p.v_scale = v_scale_.data();
    for (int64_t* stride : {p.k_scale_stride, p.v_scale_stride}) {
      stride[0] = tokens_k * s.heads_kv;
      stride[1] = 1;
      stride[2] = s.heads_kv;
    }
  }
  if (!ranges_.empty()) {
    p.key_ranges = ranges_.data();
    p.key_ranges_stride[0] = 2 * s.seqlen_q;
    p.key_ranges_stride[1] = 2;
  }
  p.softmax_scale = 1.0f / std::sqrt(static_cast<float>(s.head_dim));
  p.softcap = s.softcap;
  p.key_layout = {0, 1, 1};
  if (s.alibi) {
    p.alibi_slopes = slopes_.data();
    p.query_positions = positions_.data();
    p.query_positions_stride[0] = s.seqlen_q;
    p.query_positions_stride[1] = 1;
    p.key_layout = kLayout;
  }
  p.batch = s.batch;
  p.num_heads_q = heads_q;
  p.num_heads_kv = s.heads_kv;
  p.seqlen_q = s.seqlen_q;
  p.seqlen_k = s.seqlen_k;
  p.head_dim = s.head_dim;
  p.head_dim_v = s.head_dim_v;
  if (s.page_size) {
    const int pages = (s.seqlen_k + s.page_size - 1) / s.page_size;
    p.page_table = page_table_.data();
    p.page_table_stride[0] = pages;
    p.page_size = s.page_size;
    p.num_pages = s.batch * pages + 1;
    p.seqlen_k = int64_t{pages} * s.page_size;
  }
  p.num_workers = num_workers;
  p.dtype = s.dtype;
  p.kv_dtype = s.cached();
  p.out_dtype = p.result_dtype = DataType::kFloat32;
  return p;
}

void DecodeCase::check(int num_workers, const std::function<void(const DecodeParams&)>& lean_decode,
                       std::optional<double> tolerance) {
  lean_decode(params(num_workers));
  // Inputs are exact in both; half precision leaves room for kernels that round probabilities.
  const double limit_of_o = tolerance.value_or(shape_.dtype == DataType::kFloat32 ? 2e-5 : 2e-2);
  const auto is_close = [](double x, double expected, double limit) {
    return std::isnan(expected) ? std::isnan(x) : std::abs(x - expected) <= limit;
  };
  for (size_t row = 0; row < lse_.size(); ++row) {
    if (lse_reference_[row] == -INFINITY) {
      CHECK(lse_[row] == -INFINITY, "lse of empty row ", row, " is ", lse_[row]);
    } else {
      CHECK(is_close(lse_[row], lse_reference_[row], 1e-4), "lse of row ", row, " is ", lse_[row],
            ", not ", lse_reference_[row]);
    }
  }
  for (size_t i = 0; i < o_.size(); ++i) {
    CHECK(is_close(o_[i], o_reference_[i], limit_of_o), "o[", i, "] is ", o_[i], ", not ",
          o_reference_[i]);
  }
}

}  // namespace tree_attention::testing
