// SPDX-License-Identifier: BSD-3-Clause
//
// A step is up to kStepKeys keys, which all rows use before the next ones are loaded. Included
// inside the namespace of an instruction set.

constexpr int kPair = 2 * kLanes;
constexpr int kStepKeys = 32;

// head_dim rounded up to whole pairs of vectors, which is what a row takes in scratch memory.
inline int64_t padded(int64_t head_dim) { return (head_dim + kPair - 1) / kPair * kPair; }

constexpr int kLineBytes = 64;  // of a cache line

template <typename T>
inline void prefetch_pair(const T* p) {
  constexpr int kBytes = kPair * sizeof(T);
  for (int i = 0; i < kBytes; i += kLineBytes) {
    __builtin_prefetch(reinterpret_cast<const char*>(p) + i);
  }
}

// Whether keys and values are multiplied by scales of their tokens.
template <typename T>
constexpr bool kIsScaled = false;
template <>
constexpr bool kIsScaled<Int8> = true;
template <>
constexpr bool kIsScaled<Float8> = true;

template <bool kScaled>
struct Scales {};
template <>
struct Scales<true> {
  float k_scale[kStepKeys], v_scale[kStepKeys];
};

// Where the rows of a step's keys and values lie, and their scales. A block of kKeyBlock may read
// past the last entry, which is therefore repeated.
template <typename T>
struct Step : Scales<kIsScaled<T>> {
  const T* k[kStepKeys + kKeyBlock];
  const T* v[kStepKeys + kKeyBlock];
  int count;
};

// With this many keys or more, keys are fetched into the second-level cache well ahead of the
// steps: fewer may lie in a cache already, where fetching only costs instructions.
constexpr int64_t kManyKeys = 1024;

// Calls run(i, end, outer, token) for the runs of keys [begin, begin + count) that lie one after
// another: keys [begin + i, begin + end) are the tokens from `token` on of sequence or page
// `outer`.
template <typename Run>
inline void for_runs(const DecodeParams& p, const Rows& rows, int64_t begin, int count,
                     const Run& run) {
  if (p.page_table == nullptr) {
    run(0, count, rows.batch, begin);
    return;
  }
  const int32_t* pages =
      p.page_table + rows.batch * p.page_table_stride[0] + rows.head_kv * p.page_table_stride[1];
  int64_t page = begin / p.page_size, slot = begin % p.page_size;
  for (int i = 0, end; i < count; i = end, ++page, slot = 0) {
    const int64_t left = p.page_size - slot;
    end = left < count - i ? i + static_cast<int>(left) : count;
    run(i, end, pages[page], slot);
  }
}

// Calls body(i, address of key i, address of value i) for keys [begin, begin + count).
template <typename T, typename Body>
inline void for_addresses(const DecodeParams& p, const Rows& rows, int64_t begin, int count,
                          const Body& body) {
  for_runs(p, rows, begin, count, [&](int i, int end, int64_t outer, int64_t token) {
    const T* k = static_cast<const T*>(p.k) + outer * p.k_stride[0] + rows.head_kv * p.k_stride[1] +
                 token * p.k_stride[2];
    const T* v = static_cast<const T*>(p.v) + outer * p.v_stride[0] + rows.head_kv * p.v_stride[1] +
                 token * p.v_stride[2];
    for (; i < end; ++i, k += p.k_stride[2], v += p.v_stride[2]) body(i, k, v);
  });
}

// out [kStepKeys] = the scales of keys [begin, begin + count), the last of which is repeated.
inline void load_scales(const DecodeParams& p, const Rows& rows, int64_t begin, int count,
                        const float* scale, const int64_t (&stride)[3], float* out) {
  if (scale == nullptr) {
    for (int i = 0; i < kStepKeys; ++i) out[i] = 1.0f;
    return;
  }
  for_runs(p, rows, begin, count, [&](int i, int end, int64_t outer, int64_t token) {
    const float* of_run = scale + outer * stride[0] + rows.head_kv * stride[1] + token * stride[2];
    if (stride[2] == 1 && end - i == kStepKeys) {
      __builtin_memcpy(out, of_run, kStepKeys * sizeof(float));
      return;
    }
    for (; i < end; ++i, of_run += stride[2]) out[i] = *of_run;
  });
  for (int i = count; i < kStepKeys; ++i) out[i] = out[count - 1];
}

// Makes `step` that of keys [begin, end).
template <typename T>
inline void locate(const DecodeParams& p, const Rows& rows, int64_t begin, int64_t end,
                   Step<T>& step) {
  const int count = static_cast<int>(end - begin);
  if (count < 1) __builtin_unreachable();
  for_addresses<T>(p, rows, begin, count, [&](int i, const T* k, const T* v) {
    step.k[i] = k;
    step.v[i] = v;
  });
  for (int i = count; i < kStepKeys + kKeyBlock; ++i) {
    step.k[i] = step.k[count - 1];
    step.v[i] = step.v[count - 1];
  }
  step.count = count;
  if constexpr (kIsScaled<T>) {
    load_scales(p, rows, begin, count, p.k_scale, p.k_scale_stride, step.k_scale);
    load_scales(p, rows, begin, count, p.v_scale, p.v_scale_stride, step.v_scale);
  }
}

// Fetches the scales of keys [begin, begin + count) where they are contiguous.
inline void prefetch_scales(const DecodeParams& p, const Rows& rows, int64_t begin, int count) {
  const auto fetch = [&](const float* scale, const int64_t (&stride)[3]) {
    if (scale == nullptr || stride[2] != 1) return;
    for_runs(p, rows, begin, count, [&](int i, int end, int64_t outer, int64_t token) {
      const float* of_run =
          scale + outer * stride[0] + rows.head_kv * stride[1] + token * stride[2];
      for (; i < end; i += kLineBytes / sizeof(float), of_run += kLineBytes / sizeof(float)) {
        __builtin_prefetch(of_run);
      }
    });
  };
  fetch(p.k_scale, p.k_scale_stride);
  fetch(p.v_scale, p.v_scale_stride);
}

// The keys that are fetched into the second-level cache while some steps are computed. A core keeps
// only 16 lines in flight; its second-level cache keeps more, but fetches ahead only within 4 KiB
// and after some lines of them. So the window is walked in kPlaces places at once, half of them of
// keys and half of values, 4 KiB or more apart where keys are contiguous.
template <typename T>
class Window {
 public:
  static constexpr int kPlaces = 8;

  explicit Window(const DecodeParams& p)
      : k_end_(p.head_dim),
        v_end_(p.head_dim_v),
        place_keys_(p.head_dim * sizeof(T) < 256 ? kMaxPlaceKeys : kMaxPlaceKeys / 2) {}

  int64_t num_keys() const { return kPlaces / 2 * place_keys_; }

  // Makes this the window of keys [begin, end), at most num_keys().
  void locate(const DecodeParams& p, const Rows& rows, int64_t begin, int64_t end) {
    const int count = static_cast<int>(end - begin);
    for_addresses<T>(p, rows, begin, count, [&](int i, const T* k, const T* v) {
      k_[i] = k;
      v_[i] = v;
    });
    for (int i = count; i < num_keys(); ++i) {
      k_[i] = k_[count - 1];
      v_[i] = v_[count - 1];
    }
    if constexpr (kIsScaled<T>) prefetch_scales(p, rows, begin, count);
    key_ = d_ = 0;
  }

  // Fetches a line of each place.
  void fetch() {
    if (key_ == place_keys_) return;
    if (d_ < k_end_) fetch_lines(k_ + key_);
    if (d_ < v_end_) fetch_lines(v_ + key_);
    d_ += kLine;
    if (d_ < k_end_ || d_ < v_end_) return;
    d_ = 0;
    ++key_;
  }

 private:
  static constexpr int kMaxPlaceKeys = 32, kLine = kLineBytes / sizeof(T);

  void fetch_lines(const T* const* keys) const {
    for (int i = 0; i < kPlaces / 2; ++i, keys += place_keys_) __builtin_prefetch(*keys + d_, 0, 2);
  }

  const T *k_[kPlaces / 2 * kMaxPlaceKeys], *v_[kPlaces / 2 * kMaxPlaceKeys];
  const int64_t k_end_, v_end_, place_keys_;
  int64_t key_ = 0, d_ = 0;
};

// The end of the step that begins at `begin`, of keys up to `end`.
inline int64_t end_of_step(int64_t begin, int64_t end) {
  return begin + kStepKeys < end ? begin + kStepKeys : end;
}

// Calls body(first key, step, next step, window) for the steps of [begin, end). The step after the
// last one is that of the keys up to `limit`, or itself where there are none. The window begins
// more than a window's keys later; it is null where there are few keys or none so far. Window: a
// Window<T>, or what an instruction set fetches instead.
template <typename T, typename Window, typename Body>
inline void for_steps(const DecodeParams& p, const Rows& rows, int64_t begin, int64_t end,
                      int64_t limit, const Body& body) {
  Step<T> steps[2];
  Window window(p);
  bool has_window = false;
  int64_t next_window = limit - begin < kManyKeys ? limit : begin;
  locate(p, rows, begin, end_of_step(begin, end), steps[0]);
  for (int current = 0; begin < end; current = 1 - current) {
    const int64_t next = begin + steps[current].count;
    if (next < limit) locate(p, rows, next, end_of_step(next, limit), steps[1 - current]);
    const Step<T>& following = steps[next < limit ? 1 - current : current];
    if (begin == next_window) {
      next_window += window.num_keys();
      const int64_t first = next_window + window.num_keys(), last = first + window.num_keys();
      has_window = first < limit;
      if (has_window) window.locate(p, rows, first, last < limit ? last : limit);
    }
    body(begin, steps[current], following, has_window ? &window : nullptr);
    begin = next;
  }
}
