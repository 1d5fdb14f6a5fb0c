// SPDX-License-Identifier: BSD-3-Clause
//
// Where the keys of a step lie and what is known of the rows so far, included inside the namespace
// of an instruction set.

constexpr int kPair = 2 * kLanes;
constexpr int kStepKeys = 32;
constexpr float kLog2E = 1.44269504088896340736f;
constexpr float kLn2 = 0.693147180559945309417f;

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

// A step's keys: where their rows lie. Blocks of kKeyBlock may read past the last one, so that
// entry is repeated.
template <typename T>
struct Step {
  const T* k[kStepKeys + kKeyBlock];
  const T* v[kStepKeys + kKeyBlock];
  int count;
};

// How far ahead of the next step keys are fetched into the second-level cache.
// Fewer than kManyKeys may lie in a cache already, where that only costs instructions.
constexpr int kFarKeys = 4;
constexpr int64_t kManyKeys = 1024;

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

// Keys between two flushes.
constexpr int64_t kFlushKeys = 64 * kStepKeys;

// Scratch memory of one call, in float32 and in the lane order of load_pair. p v is summed in three
// levels, over a step, over up to kFlushKeys keys (acc) and over all (total): one chain of
// additions has ten times the rounding error of a blocked matrix product at 256k keys, three have
// less.
struct RowState {
  float* q;          // [rows, padded(head_dim)], scaled
  float* acc;        // [rows, padded(head_dim_v)], since the last flush
  float* total;      // [rows, padded(head_dim_v)], until then
  float* scores;     // [rows, kStepKeys]
  double* sum;       // [rows], of weights
  float* max;        // [rows], in base 2
  float* total_max;  // [rows], at the last flush
  char* matrices;    // of an instruction set that has them
};

constexpr int64_t kLine = 64 / sizeof(float);  // arrays begin at a cache line

// Rows that instructions work on; those beyond an output's are computed and never used.
inline int64_t padded_rows(int64_t num_rows) { return (num_rows + kLine - 1) / kLine * kLine; }

inline RowState carve(const DecodeParams& p, int64_t num_rows, void* workspace) {
  num_rows = padded_rows(num_rows);
  RowState state;
  state.q = static_cast<float*>(workspace);
  state.acc = state.q + num_rows * padded(p.head_dim);
  state.total = state.acc + num_rows * padded(p.head_dim_v);
  state.scores = state.total + num_rows * padded(p.head_dim_v);
  state.sum = reinterpret_cast<double*>(state.scores + num_rows * kStepKeys);
  state.max = reinterpret_cast<float*>(state.sum + num_rows);
  state.total_max = state.max + num_rows;
  state.matrices = reinterpret_cast<char*>(state.total_max + num_rows);
  return state;
}

inline size_t state_bytes(const DecodeParams& p, int64_t num_rows) {
  return padded_rows(num_rows) * (padded(p.head_dim) + 2 * padded(p.head_dim_v) + kStepKeys + 4) *
         sizeof(float);
}
