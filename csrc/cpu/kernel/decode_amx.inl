// SPDX-License-Identifier: BSD-3-Clause
//
// Both products in AMX tiles, for bfloat16 queries and keys that all rows see, of bfloat16 or of 8
// bits, which are converted to it without an error. Included after decode_rows.inl,
// whose state and lane order it keeps, so that keys at the edges of ranges can take that path.
// Scores^T [16 keys, 16 rows] = K Q^T takes K as it lies in memory; o [16 rows, 16 dims] += P V
// takes V as pairs of keys. P is split into two bfloat16 terms (relative error 2^-17): rounding it
// to one, as the matrix unit wants it, would cost half of the digits of o.

template <typename T>
struct MatrixKeys {
  static void attend(const DecodeParams& p, const Rows& rows, const RowState& state, int64_t begin,
                     int64_t end, int64_t limit) {
    // Tiles cost the same for one key as for 32.
    const bool few_keys = end - begin < kTileRows && rows.count <= kTileRows;
    if (p.dtype != DataType::kBFloat16 || few_keys || p.head_dim % kTilePair != 0 ||
        p.head_dim_v % kTilePair != 0) {
      attend_vectors<T>(p, rows, state, begin, end, limit);
      return;
    }
    double sum[kMaxRows];
    __builtin_memcpy(sum, state.sum, rows.count * sizeof(double));
    if (rows.count <= 4) {
      attend_columns<4>(p, rows, state, begin, end, limit);
    } else if (rows.count <= 8) {
      attend_columns<8>(p, rows, state, begin, end, limit);
    } else {
      attend_columns<kTileRows>(p, rows, state, begin, end, limit);
    }
    const int64_t size = rows.count * padded(p.head_dim_v);
    if (!has_nan(state.acc, size)) return;
    // The NaN may come from an infinite value and a weight whose second term is 0. So compute once
    // more, from the state after the last flush, with weights of one term.
    __builtin_memcpy(state.sum, sum, rows.count * sizeof(double));
    __builtin_memcpy(state.max, state.total_max, rows.count * sizeof(float));
    __builtin_memset(state.acc, 0, size * sizeof(float));
    attend_vectors<T>(p, rows, state, begin, end, limit);
  }

 private:
  // Whether scores of blocks of kColumns rows may come from digits.
  template <int kColumns>
  static constexpr bool kMayUseDigits = __is_same(T, Int8) && kColumns < kTileRows;

  // Blocks of kColumns rows: a vector holds the scores of all of them for 16 / kColumns keys.
  template <int kColumns>
  static void attend_columns(const DecodeParams& p, const Rows& rows, const RowState& state,
                             int64_t begin, int64_t end, int64_t limit) {
    const Matrices m(p, rows.count, state.matrices);
    if constexpr (kMayUseDigits<kColumns>) {
      float weights[kDigits * kColumns] = {};
      if (p.head_dim >= kTileBytes &&
          pack_digits<kColumns>(p, rows, reinterpret_cast<int8_t*>(m.q), weights)) {
        attend_packed<kColumns>(p, rows, state, m, begin, end, limit, weights);
        return;
      }
    }
    pack_queries<T>(p, rows, kColumns, m.q);
    attend_packed<kColumns>(p, rows, state, m, begin, end, limit, nullptr);
  }

  // attend_columns with the queries in m.q, of which `weights` are those of the digits, or null.
  template <int kColumns>
  static void attend_packed(const DecodeParams& p, const Rows& rows, const RowState& state,
                            const Matrices& m, int64_t begin, int64_t end, int64_t limit,
                            const float* weights) {
    const TileConfig config(rows.count < kTileRows ? static_cast<int>(rows.count) : kTileRows,
                            weights == nullptr ? kColumns : kDigitColumns);
    finish_stores();
    _tile_loadconfig(&config);
    [[maybe_unused]] int buffer = 0;  // of the keys of the step
    bool is_first = true;
    for_steps<T, Window<T>>(
        p, rows, begin, end, limit,
        [&](int64_t key, const Step<T>& step, const Step<T>& next, Window<T>* window) {
          if constexpr (kIsScaled<T>) {
            if (is_first && weights == nullptr) {
              convert_keys(step, 0, kStepKeys, 0, p.head_dim, p.head_dim, m.k);
            }
          }
          is_first = false;
          attend_step<kColumns>(p, rows, state, m, key, step, next, window, buffer, weights);
          buffer = 1 - buffer;
        });
    _tile_release();
  }

  template <int kColumns>
  static void attend_step(const DecodeParams& p, const Rows& rows, const RowState& state,
                          const Matrices& m, int64_t key, const Step<T>& step, const Step<T>& next,
                          Window<T>* window, int buffer, const float* weights) {
    if constexpr (kMayUseDigits<kColumns>) {
      if (weights != nullptr) {
        attend_digits<kColumns>(p, rows, state, m, key, step, next, window, weights);
        return;
      }
    }
    int64_t stride[2];
    const BFloat16* k[2];
    const auto keys_of = [&](int i) { return m.k + i * kStepKeys * p.head_dim; };
    for (int i = 0; i < 2; ++i) {
      if constexpr (kIsScaled<T>) {
        k[i] = keys_of(buffer) + i * kTileRows * p.head_dim;
        stride[i] = p.head_dim;
      } else {
        k[i] = key_matrix(p, step, i * kTileRows, m.k + i * kTileRows * p.head_dim, stride[i]);
      }
    }
    finish_stores();
    const int64_t num_blocks = Matrices::row_blocks(rows.count);
    Prefetcher<T> prefetcher(p, num_blocks, next, window, keys_of(1 - buffer));
    const auto score_rows = [&](int64_t block) {
      score_tiles<kColumns>(k[0], stride[0], k[1], stride[1],
                            m.q + block * kTileRows * p.head_dim / 2, p.head_dim,
                            m.scores + block % 2 * kStepKeys * kTileRows, prefetcher);
    };
    // The matrix unit scores the next rows while the vector units weigh these.
    score_rows(0);
    interleave_values(step, prefetcher, p.head_dim_v, m.v);
    for (int64_t block = 0; block < num_blocks; ++block) {
      if (block + 1 < num_blocks) score_rows(block + 1);
      const int64_t first = block * kTileRows;
      const int64_t last = first + kTileRows < rows.count ? first + kTileRows : rows.count;
      weigh_rows<kColumns>(p, rows, state, m, key, step, first, last, prefetcher);
      value_tiles(m, p.head_dim_v, state.acc + first * padded(p.head_dim_v), prefetcher);
    }
    if constexpr (kIsScaled<T>) prefetcher.finish();
  }

  // attend_step for few rows and keys of int8, whose scores come from digits.
  template <int kColumns>
  static void attend_digits(const DecodeParams& p, const Rows& rows, const RowState& state,
                            const Matrices& m, int64_t key, const Step<T>& step,
                            const Step<T>& next, Window<T>* window, const float* weights) {
    int64_t stride[2];
    const T* k[2];
    for (int i = 0; i < 2; ++i) {
      k[i] = key_matrix(p, step, i * kTileRows,
                        reinterpret_cast<T*>(m.k) + i * kTileRows * p.head_dim, stride[i]);
    }
    finish_stores();
    Prefetcher<T> prefetcher(p, 1, next, window, nullptr);
    score_digits<kColumns>(k[0], stride[0], k[1], stride[1], reinterpret_cast<int8_t*>(m.q),
                           weights, p.head_dim, m.products, m.scores, prefetcher);
    interleave_values(step, prefetcher, p.head_dim_v, m.v);
    weigh_rows<kColumns>(p, rows, state, m, key, step, 0, rows.count, prefetcher);
    value_tiles(m, p.head_dim_v, state.acc, prefetcher);
  }

  // softmax_row for rows [first, last), and the rescaling of their acc. Lanes are rows here, so
  // that maximum and sum over keys need hardly a shuffle.
  template <int kColumns>
  static void weigh_rows(const DecodeParams& p, const Rows& rows, const RowState& state,
                         const Matrices& m, int64_t key, const Step<T>& step, int64_t first,
                         int64_t last, Prefetcher<T>& next) {
    constexpr int kVectors = kStepKeys * kColumns / kLanes, kVectorKeys = kLanes / kColumns;
    float* scores = m.scores + first / kTileRows % 2 * kStepKeys * kTileRows;
    if constexpr (kIsScaled<T>) {
      for (int i = 0; i < kVectors; ++i) {
        float* of_keys = scores + i * kLanes;
        store(of_keys, mul(load(of_keys), load_keys<kColumns>(step.k_scale + i * kVectorKeys)));
      }
    }
    const bool adjusted = p.softcap != 0.0f || p.alibi_slopes != nullptr;
    if (adjusted) adjust_columns<kColumns>(p, rows, first, last, key, step.count, scores);
    const Vec scale = broadcast(adjusted ? 1.0f : score_scale(p));

    // Both ends, since the scale may be negative. Keys past the last one repeat it.
    Vec largest = load(scores), smallest = largest;
    for (int i = 1; i < kVectors; ++i) {
      largest = max_keep_nan(largest, load(scores + i * kLanes));
      smallest = min_keep_nan(smallest, load(scores + i * kLanes));
    }
    const Vec old_max = load_columns<kColumns>(state.max + first);
    const Vec new_max = max_keep_nan(
        old_max, max_of_keys<kColumns>(max_keep_nan(mul(largest, scale), mul(smallest, scale))));
    const Vec base = select_below(new_max, -FLT_MAX, zero(), new_max);  // -inf - -inf would be NaN
    const Vec rescale = exp2_nonpositive(sub(old_max, base));

    Vec sum = zero(), weights[kVectors];
    for (int i = 0; i < kVectors; ++i) {
      next.fetch(Prefetcher<T>::kWeights / kVectors);
      // Not fused: base is a rounded product, and exact ones exceed it by more than any exponent.
      weights[i] = exp2_nonpositive(sub(mul(load(scores + i * kLanes), scale), base));
      const int lanes = (step.count - i * kVectorKeys) * kColumns;
      if (lanes < kLanes) weights[i] = _mm512_maskz_mov_ps(first_lanes(lanes), weights[i]);
      sum = add(sum, weights[i]);
      if constexpr (kIsScaled<T>) {
        weights[i] = mul(weights[i], load_keys<kColumns>(step.v_scale + i * kVectorKeys));
      }
    }
    store_weights(weights, m);
    sum = sum_of_keys<kColumns>(sum);
    const __mmask16 columns = first_lanes(kColumns);
    _mm512_mask_storeu_ps(state.max + first, columns, new_max);
    const auto add_sum = [&](int begin, __m256 sums, __m256 factors) {
      double* total = state.sum + first + begin;
      const auto mask = static_cast<__mmask8>(columns >> begin);
      _mm512_mask_storeu_pd(total, mask,
                            _mm512_fmadd_pd(_mm512_maskz_loadu_pd(mask, total),
                                            _mm512_cvtps_pd(factors), _mm512_cvtps_pd(sums)));
    };
    add_sum(0, _mm512_castps512_ps256(sum), _mm512_castps512_ps256(rescale));
    add_sum(8, _mm512_extractf32x8_ps(sum, 1), _mm512_extractf32x8_ps(rescale, 1));
    float factors[kTileRows];
    store(factors, rescale);
    for (int64_t row = first; row < last; ++row) {
      if (factors[row - first] == 1.0f) continue;
      float* acc = state.acc + row * padded(p.head_dim_v);
      for (int64_t d = 0; d < p.head_dim_v; d += kLanes) {
        store(acc + d, mul(load(acc + d), broadcast(factors[row - first])));
      }
    }
  }
};

template <>
struct SharedKeys<BFloat16> : MatrixKeys<BFloat16> {};
template <>
struct SharedKeys<Int8> : MatrixKeys<Int8> {};
template <>
struct SharedKeys<Float8> : MatrixKeys<Float8> {};
