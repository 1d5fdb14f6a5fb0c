// SPDX-License-Identifier: BSD-3-Clause
//
// Attention of many rows in AMX tiles, for bfloat16 queries; included after decode_amx.inl. A row
// that does not see every key of a meeting has them masked: their scores become -inf and their
// weights 0. That is wrong only where a value is not finite, and then the vectors compute the
// output again.

template <typename T>
class PrefillCall {
 public:
  PrefillCall(const DecodeParams& p, const Rows& rows, KeyRange keys, void* workspace)
      : p_(p),
        rows_(rows),
        keys_(keys),
        m_(p, rows.count, workspace),
        num_rows_(Prefill::padded_rows(rows.count)),
        adjusted_(p.softcap != 0.0f || p.alibi_slopes != nullptr || !(score_scale(p) > 0.0f)),
        scale_(adjusted_ ? 1.0f : score_scale(p)),
        ahead_(p) {}

  // Whether o and lse are what they should be. Otherwise, and for what this cannot do, the vectors
  // have to compute them.
  bool run(float* o, float* lse) {
    if (!locate_ranges()) return false;
    pack_query_tiles<T>(p_, rows_, num_rows_, m_.q);
    for (int64_t i = 0; i < num_rows_ * p_.head_dim_v; i += kLanes) {
      store(m_.acc + i, zero());
      store(m_.total + i, zero());
    }
    for (int64_t row = 0; row < num_rows_; ++row) {
      m_.base[row] = m_.total_base[row] = kNoBase;
      m_.sum[row] = 0.0;
    }
    const TileConfig config(kTileRows, kTileRows);
    finish_stores();
    _tile_loadconfig(&config);
    const int64_t num_keys = keys_.end - keys_.begin;
    for (int64_t begin = 0; begin < num_keys; begin += kFlushKeys) {
      attend_keys(begin, begin + kFlushKeys < num_keys ? begin + kFlushKeys : num_keys);
      flush_prefill();
    }
    _tile_release();
    return !too_large_ && normalise_prefill(o, lse);
  }

 private:
  // Whether every key is seen by some row, so that it may be read.
  bool locate_ranges() {
    const int64_t group_size = p_.group_size();
    KeyRange seen{0, 0};
    for (int64_t row = 0; row < num_rows_; ++row) {
      const int64_t packed = rows_.begin + (row < rows_.count ? row : rows_.count - 1);
      if (row > 0 && packed % group_size != 0) {  // a neighbour of the same token
        m_.begin[row] = m_.begin[row - 1];
        m_.end[row] = m_.end[row - 1];
        continue;
      }
      KeyRange range = key_range(p_, rows_.batch, packed / group_size);
      if (range.begin < keys_.begin) range.begin = keys_.begin;
      if (range.end > keys_.end) range.end = keys_.end;
      if (range.empty()) range = {keys_.begin, keys_.begin};
      m_.begin[row] = static_cast<int32_t>(range.begin - keys_.begin);
      m_.end[row] = static_cast<int32_t>(range.end - keys_.begin);
      if (range.empty()) continue;
      const bool gap = !seen.empty() && (range.begin > seen.end || range.end < seen.begin);
      if (gap) return false;
      seen = hull(seen, range);
    }
    return seen.begin == keys_.begin && seen.end == keys_.end;
  }

  // Where the rows of a block meet the packed keys [key, key + num_keys), if any of them do.
  bool meet(int64_t row, int64_t key, int64_t num_keys, Meeting& meeting) const {
    int32_t first_begin = m_.begin[row], last_begin = first_begin;
    int32_t first_end = m_.end[row], last_end = first_end;
    bool some = false;
    for (int64_t i = row; i < row + kBlockRows; ++i) {
      const int32_t begin = m_.begin[i], end = m_.end[i];
      if (begin > last_begin) last_begin = begin;
      if (end < first_end) first_end = end;
      if (begin == end) continue;
      if (!some || begin < first_begin) first_begin = begin;
      if (!some || end > last_end) last_end = end;
      some = true;
    }
    const int64_t begin = first_begin > key ? first_begin - key : 0;
    const int64_t end = last_end < key + num_keys ? last_end - key : num_keys;
    if (!some || begin >= end) return false;
    meeting.row = row;
    meeting.key = key;
    meeting.first_step = static_cast<int>(begin / kStepKeys);
    meeting.last_step = static_cast<int>((end + kStepKeys - 1) / kStepKeys);
    meeting.masked = last_begin > key + meeting.first_step * kStepKeys ||
                     first_end < key + meeting.last_step * kStepKeys;
    return true;
  }

  void pack(int64_t key, int64_t num_keys, int64_t half, BFloat16* k, uint32_t* v) const {
    for (int64_t first = 0; first < num_keys; first += kStepKeys) {
      Step<T> step;
      const int64_t begin = keys_.begin + key + first;
      locate(p_, rows_, begin, end_of_step(begin, keys_.begin + key + num_keys), step);
      pack_keys(step, p_.head_dim, k + first * p_.head_dim);
      pack_values(step, p_.head_dim_v, v + first * p_.head_dim_v / 2);
      if constexpr (kIsScaled<T>) {
        const int64_t place = half * kPackedKeys + first;
        __builtin_memcpy(m_.k_scale + place, step.k_scale, sizeof(step.k_scale));
        __builtin_memcpy(m_.v_scale + place, step.v_scale, sizeof(step.v_scale));
      }
    }
    finish_stores();
  }

  // Three meetings are under way: the scores of the next one and the values of the one before are
  // multiplied while this one's weights are computed.
  void attend_keys(int64_t begin, int64_t end) {
    Meeting meetings[3];
    const Meeting *previous = nullptr, *current = nullptr;
    int64_t count = 0;
    for (int64_t key = begin; key < end; key += kPackedKeys) {
      const int64_t num_keys = end - key < kPackedKeys ? end - key : kPackedKeys;
      const int64_t half = key / kPackedKeys % 2;
      BFloat16* k = m_.k + half * kPackedKeys * p_.head_dim;
      uint32_t* v = m_.v + half * kPackedKeys * p_.head_dim_v / 2;
      pack(key, num_keys, half, k, v);
      const int64_t next_key = key + kPackedKeys, last_key = keys_.end - keys_.begin;
      ahead_.locate_keys(
          p_, rows_, keys_.begin + next_key,
          keys_.begin + (next_key + kPackedKeys < last_key ? next_key + kPackedKeys : last_key));
      const int64_t num_groups = num_rows_ / kTileRows * kPackedKeys / kGroupKeys;
      lines_per_group_ = (ahead_.lines() + num_groups - 1) / num_groups;
      for (int64_t row = 0; row < num_rows_; row += kBlockRows) {
        Meeting& next = meetings[count % 3];
        if (!meet(row, key, num_keys, next)) continue;
        next.k = k;
        next.v = v;
        next.k_scale = m_.k_scale + half * kPackedKeys;
        next.v_scale = m_.v_scale + half * kPackedKeys;
        next.scores = m_.scores + count % 3 * kScoreWords;
        ++count;
        advance(previous, current, &next);
        previous = current;
        current = &next;
      }
    }
    advance(previous, current, nullptr);
    advance(current, nullptr, nullptr);
  }

  void advance(const Meeting* previous, const Meeting* current, const Meeting* next) {
    TileWork work(p_, m_, previous, next);
    int64_t units = work.units();
    if (current != nullptr) {
      if (previous != nullptr && previous->row == current->row) {
        // its sums are about to be rescaled
        work.run(units);
        units = 0;
      }
      finish_stores();
      weigh(*current, work, units);
    }
    finish_stores();
    work.run(units);
    finish_stores();
  }

  // Scores to weights, with `units` of work spread over it.
  void weigh(const Meeting& meeting, TileWork& work, int64_t& units) {
    const int first = meeting.first_step * kStepKeys, last = meeting.last_step * kStepKeys;
    const int64_t num_groups = 2 * (last - first) / kGroupKeys, num_units = units;
    int64_t credit = 0;
    for (int64_t tile = 0; tile < 2; ++tile) {
      const int64_t row = meeting.row + tile * kTileRows;
      float* scores = meeting.scores + tile * kPackedKeys * kTileRows;
      if constexpr (kIsScaled<T>) {
        for (int key = first; key < last; ++key) {
          float* of_key = scores + key * kTileRows;
          store(of_key, mul(load(of_key), broadcast(meeting.k_scale[key])));
        }
      }
      if (adjusted_) adjust(meeting, row, scores);
      if (meeting.masked) mask(meeting, row, scores);
      follow_scores(row, first, last, scores);
      const Vec scale = broadcast(scale_);
      const Vec offset = sub(broadcast(kRoundToInteger), load(m_.base + row));
      Vec sums[2] = {zero(), zero()};
      for (int key = first; key < last; key += kGroupKeys) {
        for (int i = 0; i < kGroupKeys; i += 2) {
          float* pair = scores + (key + i) * kTileRows;
          Vec a = exp2_above(load(pair), scale, offset);
          Vec b = exp2_above(load(pair + kTileRows), scale, offset);
          sums[0] = add(sums[0], a);
          sums[1] = add(sums[1], b);
          if constexpr (kIsScaled<T>) {
            a = mul(a, broadcast(meeting.v_scale[key + i]));
            b = mul(b, broadcast(meeting.v_scale[key + i + 1]));
          }
          store_weight_pairs(a, b, pair);
        }
        ahead_.fetch(lines_per_group_);
        for (credit += num_units; credit >= num_groups; credit -= num_groups) {
          work.run(1);
          --units;
        }
      }
      const Vec sum = add(sums[0], sums[1]);
      double* total = m_.sum + row;
      _mm512_storeu_pd(total, _mm512_add_pd(_mm512_loadu_pd(total),
                                            _mm512_cvtps_pd(_mm512_castps512_ps256(sum))));
      _mm512_storeu_pd(total + 8, _mm512_add_pd(_mm512_loadu_pd(total + 8),
                                                _mm512_cvtps_pd(_mm512_extractf32x8_ps(sum, 1))));
    }
  }

  void adjust(const Meeting& meeting, int64_t row, float* scores) const {
    const int64_t last_row = row + kTileRows < rows_.count ? row + kTileRows : rows_.count;
    for (int step = meeting.first_step; step < meeting.last_step; ++step) {
      const int64_t key = keys_.begin + meeting.key + step * kStepKeys;
      const int64_t count = end_of_step(key, keys_.end) - key;
      adjust_columns<kTileRows>(p_, rows_, row, last_row, key, static_cast<int>(count),
                                scores + step * kStepKeys * kTileRows);
    }
  }

  void mask(const Meeting& meeting, int64_t row, float* scores) const {
    const __m512i begin = _mm512_loadu_si512(m_.begin + row),
                  end = _mm512_loadu_si512(m_.end + row);
    const Vec nothing = broadcast(-INFINITY);
    for (int i = meeting.first_step * kStepKeys; i < meeting.last_step * kStepKeys; ++i) {
      const __m512i key = _mm512_set1_epi32(static_cast<int>(meeting.key + i));
      const __mmask16 seen =
          _mm512_cmple_epi32_mask(begin, key) & _mm512_cmplt_epi32_mask(key, end);
      float* score = scores + i * kTileRows;
      store(score, _mm512_mask_mov_ps(nothing, seen, load(score)));
    }
  }

  // Raises the bases of a tile of rows where its largest scores exceed them by too much.
  void follow_scores(int64_t row, int first, int last, const float* scores) {
    Vec largest[4];
    for (int i = 0; i < 4; ++i) largest[i] = load(scores + (first + i) * kTileRows);
    for (int key = first + 4; key < last; key += 4) {
      for (int i = 0; i < 4; ++i) {
        largest[i] = max_keep_nan(largest[i], load(scores + (key + i) * kTileRows));
      }
    }
    const Vec top = mul(
        max_keep_nan(max_keep_nan(largest[0], largest[1]), max_keep_nan(largest[2], largest[3])),
        broadcast(scale_));
    const Vec base = load(m_.base + row);
    const __mmask16 above = _mm512_cmp_ps_mask(top, add(base, broadcast(kBaseSlack)), _CMP_NLE_UQ);
    if (above == 0) return;
    const Vec new_base =
        _mm512_mask_roundscale_ps(base, above, top, _MM_FROUND_TO_POS_INF | _MM_FROUND_NO_EXC);
    too_large_ |=
        _mm512_mask_cmp_ps_mask(above, abs(top), broadcast(kLargestScore), _CMP_NLT_UQ) != 0;
    store(m_.base + row, new_base);
    const Vec factor = _mm512_scalef_ps(broadcast(1.0f), sub(base, new_base));
    float* acc = m_.acc + row * p_.head_dim_v;
    for (int64_t i = 0; i < p_.head_dim_v * kTileRows; i += kLanes) {
      store(acc + i, mul(load(acc + i), factor));
    }
    double* sum = m_.sum + row;
    _mm512_storeu_pd(
        sum, _mm512_mul_pd(_mm512_loadu_pd(sum), _mm512_cvtps_pd(_mm512_castps512_ps256(factor))));
    _mm512_storeu_pd(sum + 8, _mm512_mul_pd(_mm512_loadu_pd(sum + 8),
                                            _mm512_cvtps_pd(_mm512_extractf32x8_ps(factor, 1))));
  }

  void flush_prefill() {
    for (int64_t row = 0; row < num_rows_; row += kTileRows) {
      const Vec base = load(m_.base + row);
      const Vec factor = _mm512_scalef_ps(broadcast(1.0f), sub(load(m_.total_base + row), base));
      float *total = m_.total + row * p_.head_dim_v, *acc = m_.acc + row * p_.head_dim_v;
      for (int64_t i = 0; i < p_.head_dim_v * kTileRows; i += kLanes) {
        store(total + i, fma(load(total + i), factor, load(acc + i)));
        store(acc + i, zero());
      }
      store(m_.total_base + row, base);
    }
  }

  // o [rows, head_dim_v], in the order of memory, and lse [rows]; false if o is not finite.
  bool normalise_prefill(float* o, float* lse) const {
    __mmask16 not_finite = 0;
    for (int64_t first = 0; first < rows_.count; first += kTileRows) {
      const int64_t count = first + kTileRows < rows_.count ? kTileRows : rows_.count - first;
      float factor[kTileRows];
      for (int64_t i = 0; i < count; ++i) {
        const float sum = static_cast<float>(m_.sum[first + i]);
        factor[i] = sum == 0.0f ? 0.0f : 1.0f / sum;
        lse[first + i] = sum == 0.0f ? -INFINITY : m_.base[first + i] * kLn2 + __builtin_logf(sum);
      }
      const float* total = m_.total + first * p_.head_dim_v;
      for (int64_t d = 0; d < p_.head_dim_v; d += kTilePair) {
        __m512i even[kTileRows], odd[kTileRows];
        for (int i = 0; i < kTileRows; ++i) {
          even[i] = _mm512_load_si512(total + (d + i) * kTileRows);
          odd[i] = _mm512_load_si512(total + (d + kTileRows + i) * kTileRows);
        }
        transpose(even);
        transpose(odd);
        for (int64_t i = 0; i < count; ++i) {
          Vec a = mul(_mm512_castsi512_ps(even[i]), broadcast(factor[i]));
          Vec b = mul(_mm512_castsi512_ps(odd[i]), broadcast(factor[i]));
          constexpr int kNotFinite = 0x99;  // quiet NaN, +-infinity, signalling NaN
          not_finite |=
              _mm512_fpclass_ps_mask(a, kNotFinite) | _mm512_fpclass_ps_mask(b, kNotFinite);
          to_memory_order(static_cast<const T*>(nullptr), a, b);
          float* out = o + (first + i) * p_.head_dim_v + d;
          store(out, a);
          store(out + kLanes, b);
        }
      }
    }
    return not_finite == 0;
  }

  const DecodeParams& p_;
  const Rows& rows_;
  const KeyRange keys_;
  const Prefill m_;
  const int64_t num_rows_;
  const bool adjusted_;
  const float scale_;
  FarPrefetcher<T> ahead_;       // of the keys to be packed next
  int64_t lines_per_group_ = 0;  // which it fetches
  bool too_large_ = false;
};
