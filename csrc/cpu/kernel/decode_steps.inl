// SPDX-License-Identifier: BSD-3-Clause
//
// A step is up to kStepKeys keys, which all rows use before the next ones are loaded. Included
// inside the namespace of an instruction set.

constexpr int kPair = 2 * kLanes;
constexpr int kStepKeys = 32;

// head_dim rounded up to whole pairs of vectors, which is what a row takes in scratch memory.
inline int64_t padded(int64_t head_dim) { return (head_dim + kPair - 1) / kPair * kPair; }

template <typename T>
inline void prefetch_pair(const T* p) {
  constexpr int kBytes = kPair * sizeof(T);
  for (int i = 0; i < kBytes; i += 64) __builtin_prefetch(reinterpret_cast<const char*>(p) + i);
}

template <typename T>
inline void prefetch_pair_far(const T* p) {
  constexpr int kBytes = kPair * sizeof(T);
  for (int i = 0; i < kBytes; i += 64) {
    __builtin_prefetch(reinterpret_cast<const char*>(p) + i, 0, 2);  // into the second level
  }
}

// Where the rows of a step's keys and values lie. A block of kKeyBlock may read past the last
// entry, which is therefore repeated.
template <typename T>
struct Step {
  const T* k[kStepKeys + kKeyBlock];
  const T* v[kStepKeys + kKeyBlock];
  int count;
};

// How far beyond the next step keys are fetched into the second-level cache, if there are kManyKeys
// or more: fewer may lie in a cache already, where fetching only costs instructions.
constexpr int kFarKeys = 4;
constexpr int64_t kManyKeys = 1024;

// Makes `step` that of keys [begin, end).
template <typename T>
inline void locate(const DecodeParams& p, const Rows& rows, int64_t begin, int64_t end,
                   Step<T>& step) {
  const T* k = static_cast<const T*>(p.k) + rows.head_kv * p.k_stride[1];
  const T* v = static_cast<const T*>(p.v) + rows.head_kv * p.v_stride[1];
  const int count = static_cast<int>(end - begin);
  if (count < 1) __builtin_unreachable();
  if (p.page_table == nullptr) {
    k += rows.batch * p.k_stride[0] + begin * p.k_stride[2];
    v += rows.batch * p.v_stride[0] + begin * p.v_stride[2];
    for (int i = 0; i < count; ++i) {
      step.k[i] = k + i * p.k_stride[2];
      step.v[i] = v + i * p.v_stride[2];
    }
  } else {
    const int32_t* pages =
        p.page_table + rows.batch * p.page_table_stride[0] + rows.head_kv * p.page_table_stride[1];
    int64_t page = begin / p.page_size, slot = begin % p.page_size;
    for (int i = 0; i < count; ++i) {
      step.k[i] = k + pages[page] * p.k_stride[0] + slot * p.k_stride[2];
      step.v[i] = v + pages[page] * p.v_stride[0] + slot * p.v_stride[2];
      if (++slot == p.page_size) {
        slot = 0;
        ++page;
      }
    }
  }
  for (int i = count; i < kStepKeys + kKeyBlock; ++i) {
    step.k[i] = step.k[count - 1];
    step.v[i] = step.v[count - 1];
  }
  step.count = count;
}

// The end of the step that begins at `begin`, of keys up to `end`.
inline int64_t end_of_step(int64_t begin, int64_t end) {
  return begin + kStepKeys < end ? begin + kStepKeys : end;
}

// Calls body(first key, step, next step, far step) for the steps of [begin, end). The step after
// the last one is that of the keys up to `limit`, or itself where there are none. The far step
// begins kFarKeys after the next one; it is null where there are few keys or none so far.
template <typename T, typename Body>
inline void for_steps(const DecodeParams& p, const Rows& rows, int64_t begin, int64_t end,
                      int64_t limit, const Body& body) {
  Step<T> steps[2], far;
  const bool many_keys = limit - begin >= kManyKeys;
  locate(p, rows, begin, end_of_step(begin, end), steps[0]);
  for (int current = 0; begin < end; current = 1 - current) {
    const int64_t next = begin + steps[current].count;
    if (next < limit) locate(p, rows, next, end_of_step(next, limit), steps[1 - current]);
    const Step<T>& following = steps[next < limit ? 1 - current : current];
    const int64_t far_begin = next + kFarKeys;
    const bool has_far = many_keys && far_begin < limit;
    if (has_far) locate(p, rows, far_begin, end_of_step(far_begin, limit), far);
    body(begin, steps[current], following, has_far ? &far : nullptr);
    begin = next;
  }
}
