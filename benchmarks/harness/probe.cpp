// SPDX-License-Identifier: BSD-3-Clause
//
// What the machine can do at best: the ceilings that benchmarks report shares of. Every function
// uses the threads of at::parallel_for, the ones that the operators run on.
#include <ATen/Parallel.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <atomic>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace {

constexpr int64_t kLineBytes = 64;

// A grain of one makes at::parallel_for give every thread exactly one index.
template <typename F>
void on_every_thread(const F& body) {
  const int64_t num_threads = at::get_num_threads();
  at::parallel_for(0, num_threads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) body(i, num_threads);
  });
}

using Line = uint64_t __attribute__((vector_size(kLineBytes), aligned(1), may_alias));

// Four streams with a prefetch 1 KiB ahead: the fastest of ten patterns tried (one to eight
// streams, with and without prefetch), and closer to how a kernel reads K and V than one stream.
inline __attribute__((always_inline)) uint64_t read_lines(const char* data, int64_t num_bytes) {
  constexpr int64_t kStreams = 4, kAhead = 1024, kStep = 2 * kLineBytes;
  const int64_t stream_bytes = num_bytes / kStreams / kStep * kStep;
  Line sum[2 * kStreams] = {};
  for (int64_t i = 0; i < stream_bytes; i += kStep) {
    for (int64_t s = 0; s < kStreams; ++s) {
      const char* line = data + s * stream_bytes + i;
      __builtin_prefetch(line + kAhead);
      __builtin_prefetch(line + kAhead + kLineBytes);
      sum[2 * s] ^= *reinterpret_cast<const Line*>(line);
      sum[2 * s + 1] ^= *reinterpret_cast<const Line*>(line + kLineBytes);
    }
  }
  uint64_t total = 0;
  for (const Line& part : sum) {
    for (int i = 0; i < 8; ++i) total ^= part[i];
  }
  for (int64_t i = kStreams * stream_bytes; i < num_bytes; ++i) total ^= uint64_t(data[i]);
  return total;
}

// The sum of all lanes, so that no accumulator is dead. They start from different values, or the
// compiler would compute one of them and copy it.
template <typename Vector, int kAccumulators>
inline __attribute__((always_inline)) float add_lanes(const Vector (&sum)[kAccumulators]) {
  float lanes[kAccumulators * sizeof(Vector) / sizeof(float)];
  std::memcpy(lanes, sum, sizeof(sum));
  float total = 0.0f;
  for (float lane : lanes) total += lane;
  return total;
}

struct MultiplyAdd {
  float value;
  int64_t operations_per_repeat;
};

using ReadFunction = uint64_t (*)(const char*, int64_t);
using MultiplyAddFunction = MultiplyAdd (*)(int64_t);

uint64_t read_portable(const char* data, int64_t num_bytes) { return read_lines(data, num_bytes); }

MultiplyAdd multiply_add_portable(int64_t repeats) {
  using Vector = float __attribute__((vector_size(16)));
  constexpr int kAccumulators = 12;
  const Vector half = Vector{} + 0.5f, one = Vector{} + 1.0f;
  Vector sum[kAccumulators];
  for (int i = 0; i < kAccumulators; ++i) sum[i] = Vector{} + static_cast<float>(i);
  for (int64_t i = 0; i < repeats; ++i) {
#if defined(__aarch64__)
    for (Vector& s : sum) s = vfmaq_f32(one, s, half);
#else
    for (Vector& s : sum) s = s * half + one;
#endif
  }
  return {add_lanes(sum), 2 * 4 * kAccumulators};
}

#if defined(__x86_64__)
// Ten accumulators hide the four cycles of latency on two multiply-add units and fit 16 registers.
__attribute__((target("avx2,fma"))) uint64_t read_avx2(const char* data, int64_t num_bytes) {
  return read_lines(data, num_bytes);
}

__attribute__((target("avx2,fma"))) MultiplyAdd multiply_add_avx2(int64_t repeats) {
  constexpr int kAccumulators = 10;
  const __m256 half = _mm256_set1_ps(0.5f), one = _mm256_set1_ps(1.0f);
  __m256 sum[kAccumulators];
  for (int i = 0; i < kAccumulators; ++i) sum[i] = _mm256_set1_ps(static_cast<float>(i));
  for (int64_t i = 0; i < repeats; ++i) {
    for (__m256& s : sum) s = _mm256_fmadd_ps(s, half, one);
  }
  return {add_lanes(sum), 2 * 8 * kAccumulators};
}

__attribute__((target("avx512f"))) uint64_t read_avx512(const char* data, int64_t num_bytes) {
  return read_lines(data, num_bytes);
}

__attribute__((target("avx512f"))) MultiplyAdd multiply_add_avx512(int64_t repeats) {
  constexpr int kAccumulators = 16;
  const __m512 half = _mm512_set1_ps(0.5f), one = _mm512_set1_ps(1.0f);
  __m512 sum[kAccumulators];
  for (int i = 0; i < kAccumulators; ++i) sum[i] = _mm512_set1_ps(static_cast<float>(i));
  for (int64_t i = 0; i < repeats; ++i) {
    for (__m512& s : sum) s = _mm512_fmadd_ps(s, half, one);
  }
  return {add_lanes(sum), 2 * 16 * kAccumulators};
}

// Six accumulators hide the latency of a tile product, and no operand is loaded.
__attribute__((target("amx-tile,amx-bf16"))) MultiplyAdd multiply_add_tiles(int64_t repeats) {
  struct alignas(64) {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes_per_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  } config;
  asm volatile("" ::"m"(config));  // the intrinsic does not say that it reads memory
  _tile_loadconfig(&config);
  for (int64_t i = 0; i < repeats; ++i) {
    _tile_dpbf16ps(0, 6, 7);
    _tile_dpbf16ps(1, 6, 7);
    _tile_dpbf16ps(2, 6, 7);
    _tile_dpbf16ps(3, 6, 7);
    _tile_dpbf16ps(4, 6, 7);
    _tile_dpbf16ps(5, 6, 7);
  }
  _tile_release();
  return {0.0f, 2 * 16 * 16 * 32 * 6};
}
#endif

struct Functions {
  ReadFunction read = read_portable;
  MultiplyAddFunction multiply_add = multiply_add_portable;
};

// The ceiling is the machine's, so this takes the widest set it has, whatever the kernel uses.
Functions widest() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) return {read_avx512, multiply_add_avx512};
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    return {read_avx2, multiply_add_avx2};
  }
#endif
  return {};
}

// Pins thread i to cpus[i]. Returns the CPU on which each thread then runs, -1 for a thread that
// could not be pinned (no CPU was given for it, or the system has no thread affinity).
std::vector<int> pin_threads(const std::vector<int>& cpus) {
  std::vector<int> running_on(at::get_num_threads(), -1);
#if defined(__linux__)
  on_every_thread([&](int64_t thread, int64_t) {
    if (thread >= static_cast<int64_t>(cpus.size())) return;
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(cpus[thread], &one);
    if (pthread_setaffinity_np(pthread_self(), sizeof(one), &one) == 0) {
      running_on[thread] = sched_getcpu();
    }
  });
#endif
  return running_on;
}

// Reads every byte of the buffers (address, number of bytes) once. The value keeps the compiler
// from dropping the loads.
uint64_t read_memory(const std::vector<std::pair<uintptr_t, int64_t>>& buffers) {
  const ReadFunction read = widest().read;
  std::atomic<uint64_t> total{0};
  on_every_thread([&](int64_t thread, int64_t num_threads) {
    uint64_t sum = 0;
    for (const auto& [address, num_bytes] : buffers) {
      const int64_t begin = num_bytes * thread / num_threads;
      const int64_t end = num_bytes * (thread + 1) / num_threads;
      sum ^= read(reinterpret_cast<const char*>(address) + begin, end - begin);
    }
    total.fetch_xor(sum);
  });
  return total;
}

double operations_of(MultiplyAddFunction run, int64_t repeats) {
  std::atomic<int64_t> operations{0};
  std::atomic<float> value{0.0f};
  on_every_thread([&](int64_t, int64_t) {
    const MultiplyAdd result = run(repeats);
    operations += result.operations_per_repeat * repeats;
    value.store(result.value);
  });
  return static_cast<double>(operations);
}

// Runs `repeats` rounds of independent float32 fused multiply-adds in registers on every thread.
// Returns the floating-point operations done, two for each multiply-add.
double multiply_add(int64_t repeats) { return operations_of(widest().multiply_add, repeats); }

// The same with bfloat16 products in AMX tiles, which the process may use.
double multiply_add_bf16_tiles(int64_t repeats) {
#if defined(__x86_64__)
  return operations_of(multiply_add_tiles, repeats);
#else
  return 0.0;
#endif
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using ReleaseGil = pybind11::call_guard<pybind11::gil_scoped_release>;
  m.def("pin_threads", &pin_threads, ReleaseGil());
  m.def("read_memory", &read_memory, ReleaseGil());
  m.def("multiply_add", &multiply_add, ReleaseGil());
  m.def("multiply_add_bf16_tiles", &multiply_add_bf16_tiles, ReleaseGil());
}
