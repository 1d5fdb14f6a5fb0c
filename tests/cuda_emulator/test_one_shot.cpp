// SPDX-License-Identifier: BSD-3-Clause
//
// The one-shot exchange: every rank a stream of one device, its results those of merge_states.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "check.h"
#include "cuda/merge/merge_states.cuh"
#include "cuda/one_shot/one_shot.cuh"
#include "machine.h"

namespace {

using namespace tree_attention;
using cuda::OneShotError;

constexpr uint64_t kLong = uint64_t{1} << 60, kShort = 50'000;  // nanoseconds

int64_t size_of(DataType dtype) { return dtype == DataType::kFloat32 ? 4 : 2; }

struct Shape {
  int64_t num_rows;
  int32_t head_dim;
  DataType dtype = DataType::kFloat32, out_dtype = DataType::kFloat32;

  int64_t size() const { return num_rows * head_dim; }
  int64_t state_bytes() const {
    return cuda::one_shot_state_bytes(num_rows, head_dim * size_of(dtype));
  }
};

// Bytes that begin as NaN.
using Bytes = std::vector<unsigned char>;

// What the ranks give to a call and get from it.
struct Call {
  Call(int world_size, const Shape& shape, std::mt19937& random)
      : shape(shape),
        o(world_size * shape.size() * size_of(shape.dtype), 0xff),
        out_o(world_size, Bytes(shape.size() * size_of(shape.out_dtype), 0xff)),
        lse(world_size * shape.num_rows),
        out_lse(world_size, std::vector<float>(shape.num_rows, 1.0f)) {
    std::normal_distribution<float> normal;
    for (size_t row = 0; row < lse.size(); ++row) {
      const bool is_empty = random() % 3 == 0;  // and has NaN for o
      lse[row] = is_empty ? -INFINITY : 5 * normal(random);
      for (int i = 0; i < shape.head_dim && !is_empty; ++i) {
        const float x = normal(random);
        // The upper half of a float is a bfloat16.
        const auto* bytes = reinterpret_cast<const unsigned char*>(&x) + 4 - size_of(shape.dtype);
        std::memcpy(&o[(row * shape.head_dim + i) * size_of(shape.dtype)], bytes,
                    size_of(shape.dtype));
      }
    }
  }

  unsigned char* o_of(int rank) { return o.data() + rank * shape.size() * size_of(shape.dtype); }
  float* lse_of(int rank) { return lse.data() + rank * shape.num_rows; }

  void check_result(int rank) {
    Bytes expected_o(out_o[rank].size());
    std::vector<float> expected_lse(shape.num_rows);
    MergeParams p{};
    p.o_parts = o.data();
    p.lse_parts = lse.data();
    p.o = expected_o.data();
    p.lse = expected_lse.data();
    p.o_stride[0] = shape.size();
    p.o_stride[1] = shape.head_dim;
    p.lse_stride[0] = shape.num_rows;
    p.lse_stride[1] = 1;
    p.num_parts = static_cast<int64_t>(out_o.size());
    p.num_rows = shape.num_rows;
    p.head_dim = shape.head_dim;
    p.dtype = shape.dtype;
    p.out_dtype = shape.out_dtype;
    CHECK(cuda::launch_merge_states(p, nullptr) == cudaSuccess, "the launch failed");
    CHECK(out_o[rank] == expected_o, "o of rank ", rank, " of ", out_o.size());
    if (shape.num_rows == 0) return;
    CHECK(std::memcmp(out_lse[rank].data(), expected_lse.data(), 4 * shape.num_rows) == 0,
          "lse of rank ", rank, " of ", out_o.size());
  }

  float out(int rank, int64_t i) const {
    CHECK(shape.out_dtype == DataType::kFloat32, "");
    float x;
    std::memcpy(&x, &out_o[rank][4 * i], 4);
    return x;
  }

  void check_poison(int rank) const {
    for (float x : out_lse[rank]) CHECK(std::isnan(x), x);
    for (int64_t i = 0; i < shape.size(); ++i) CHECK(std::isnan(out(rank, i)), out(rank, i));
  }

  const Shape shape;
  Bytes o;
  std::vector<Bytes> out_o;  // of each rank
  std::vector<float> lse;
  std::vector<std::vector<float>> out_lse;
};

class World {
 public:
  World(int size, int64_t slot_bytes, uint64_t timeout = kLong)
      : size_(size), slot_bytes_(slot_bytes), ranks_(size) {
    for (Rank& rank : ranks_) {
      rank.buffer.resize(cuda::one_shot_buffer_bytes(size, slot_bytes));
      rank.host.timeout = timeout;
      // Until they are written, slots are NaN.
      const size_t flag_bytes = cuda::kOneShotFlags * sizeof(uint64_t);
      std::memset(rank.buffer.data() + flag_bytes, 0xff, rank.buffer.size() - flag_bytes);
      buffers_.push_back(reinterpret_cast<int64_t>(rank.buffer.data()));
    }
  }

  // On the rank's stream.
  void launch(int rank, Call& call) {
    Rank& own = ranks_[rank];
    cuda::OneShotParams p{};
    p.o = call.o_of(rank);
    p.lse = call.lse_of(rank);
    p.out_o = call.out_o[rank].data();
    p.out_lse = call.out_lse[rank].data();
    p.buffers = buffers_.data();
    p.control = &own.control;
    p.host = &own.host;
    p.slot_bytes = slot_bytes_;
    p.num_rows = call.shape.num_rows;
    p.head_dim = call.shape.head_dim;
    p.rank = rank;
    p.world_size = size_;
    p.dtype = call.shape.dtype;
    p.out_dtype = call.shape.out_dtype;
    CHECK(cuda::launch_one_shot(p, reinterpret_cast<cudaStream_t>(&own)) == cudaSuccess, "");
  }

  // By all ranks but one, at the same time.
  void run(Call& call, int missing = -1) {
    emulator::Streams streams;
    for (int rank = 0; rank < size_; ++rank) {
      if (rank != missing) launch(rank, call);
    }
    streams.run();
  }

  void abort(int rank) { ranks_[rank].host.aborted = 1; }

  // The one rank whose absence `rank` noticed, or -1.
  int found(int rank, OneShotError expected) const {
    int found = -1;
    for (int peer = 0; peer < size_; ++peer) {
      const OneShotError error = ranks_[rank].host.error[peer];
      if (error == OneShotError::kNone) continue;
      CHECK(error == expected && found == -1, "rank ", rank, " on rank ", peer, ": ",
            static_cast<uint64_t>(error));
      found = peer;
    }
    return found;
  }

 private:
  struct Rank {
    Bytes buffer;
    cuda::OneShotControl control{};
    cuda::OneShotHost host{};
  };

  int size_;
  int64_t slot_bytes_;
  std::vector<Rank> ranks_;
  std::vector<int64_t> buffers_;
};

using Calls = std::vector<std::unique_ptr<Call>>;

Calls make_calls(int world_size, const std::vector<Shape>& shapes, std::mt19937& random) {
  Calls calls;
  for (const Shape& shape : shapes) {
    calls.push_back(std::make_unique<Call>(world_size, shape, random));
  }
  return calls;
}

// Ranks are up to one call apart.
void check_calls(int world_size, const std::vector<Shape>& shapes, uint64_t seed) {
  std::mt19937 random(static_cast<unsigned>(seed));
  emulator::options() = {seed, cuda::kOneShotMaxBlocks};
  int64_t slot_bytes = 0;
  for (const Shape& shape : shapes) slot_bytes = std::max(slot_bytes, shape.state_bytes());
  World world(world_size, slot_bytes);
  Calls calls = make_calls(world_size, shapes, random);
  {
    emulator::Streams streams;
    for (int rank = 0; rank < world_size; ++rank) {
      for (auto& call : calls) world.launch(rank, *call);
    }
    streams.run();
  }
  for (int rank = 0; rank < world_size; ++rank) {
    for (auto& call : calls) call->check_result(rank);
    CHECK(world.found(rank, OneShotError::kNone) == -1, rank);
  }
}

constexpr DataType kFloat = DataType::kFloat32, kBFloat = DataType::kBFloat16,
                   kHalf = DataType::kFloat16;

}  // namespace

void test_one_shot_worlds() {
  const std::vector<Shape> shapes = {{20, 128, kFloat, kFloat}, {1, 64, kFloat, kBFloat},
                                     {7, 8, kBFloat, kBFloat},  {33, 128, kFloat, kHalf},
                                     {5, 72, kBFloat, kFloat},  {19, 256, kBFloat, kHalf}};
  for (int world_size = 1; world_size <= 8; ++world_size) {
    check_calls(world_size, shapes, world_size);
  }
  check_calls(11, {{3, 4}}, 11);
  check_calls(cuda::kOneShotMaxRanks, {{2, 4}, {2, 4}, {2, 4}}, 16);
}

// More rows than blocks have threads, in a grid that does not divide them.
void test_one_shot_rows() {
  check_calls(2, {{601, 4}, {0, 4}, {35, 512, kBFloat, kBFloat}, {600, 4}, {601, 4}}, 1);
}

// The smallest problems with several blocks and with one, in many orders of threads.
void test_one_shot_epochs() {
  for (uint64_t seed = 0; seed < 20; ++seed) {
    check_calls(2 + seed % 2, std::vector<Shape>(6, Shape{3, 1024}), seed);
    check_calls(2, std::vector<Shape>(40, Shape{1, 4}), seed);
  }
}

// Also under ThreadSanitizer.
void test_one_shot_short() {
  check_calls(2, std::vector<Shape>(3, Shape{2, 1024}), 0);
  check_calls(3, std::vector<Shape>(3, Shape{1, 4}), 1);
}

void test_one_shot_nan() {
  std::mt19937 random(0);
  emulator::options() = {3, cuda::kOneShotMaxBlocks};
  World world(3, Shape{9, 128}.state_bytes());
  Call clean(3, {9, 128}, random), call = clean;
  const float nan = NAN;
  for (Call* c : {&clean, &call}) c->lse_of(1)[4] = c->lse_of(1)[7] = 1.0f;
  std::memset(clean.o_of(1), 0, clean.shape.size() * 4);
  std::memset(call.o_of(1), 0, call.shape.size() * 4);
  std::memcpy(call.o_of(1) + 4 * (4 * 128 + 5), &nan, 4);
  call.lse_of(1)[7] = NAN;
  world.run(clean);
  world.run(call);
  for (int rank = 0; rank < 3; ++rank) {
    for (int64_t i = 0; i < call.shape.size(); ++i) {
      const bool reached = i == 4 * 128 + 5 || i / 128 == 7;
      CHECK(reached ? std::isnan(call.out(rank, i)) : call.out(rank, i) == clean.out(rank, i), i);
    }
    for (int row = 0; row < 9; ++row) {
      CHECK((row == 7) == std::isnan(call.out_lse[rank][row]), row);
    }
  }
}

// A rank that comes too late has a result; nobody has another one after that, and nobody waits.
void test_one_shot_missing_rank() {
  for (uint64_t seed = 0; seed < 6; ++seed) {
    std::mt19937 random(static_cast<unsigned>(seed));
    emulator::options() = {seed, cuda::kOneShotMaxBlocks};
    const int size = 2 + static_cast<int>(seed) % 3, missing = static_cast<int>(seed) % size;
    const Shape shape{3, 1024};
    World world(size, shape.state_bytes(), kShort);
    Calls calls = make_calls(size, std::vector<Shape>(4, shape), random);
    world.run(*calls[0]);
    world.run(*calls[0]);  // now all slots hold something
    world.run(*calls[1], missing);
    const uint64_t begin = emulator::clock();
    world.run(*calls[2], missing);
    CHECK(emulator::clock() - begin == 1000, "a failed rank waited");
    world.launch(missing, *calls[1]);
    world.launch(missing, *calls[2]);
    world.launch(missing, *calls[3]);
    for (int rank = 0; rank < size; ++rank) {
      calls[0]->check_result(rank);
      if (rank == missing) continue;
      calls[1]->check_poison(rank);
      calls[2]->check_poison(rank);
      CHECK(world.found(rank, OneShotError::kMissing) == missing, rank);
    }
    calls[1]->check_result(missing);
    calls[2]->check_poison(missing);
    calls[3]->check_poison(missing);
  }
}

void test_one_shot_abort() {
  std::mt19937 random(0);
  emulator::options() = {5, cuda::kOneShotMaxBlocks};
  const Shape shape{3, 1024};
  World world(2, shape.state_bytes());
  Calls calls = make_calls(2, {shape, shape}, random);
  world.abort(0);
  world.run(*calls[0]);  // nobody waits for long
  world.run(*calls[1], 1);
  calls[0]->check_result(0);
  calls[1]->check_poison(0);
  CHECK(world.found(0, OneShotError::kAborted) == 1, "");
}

// Graphs of different sizes, replayed together: no host compares them.
void test_one_shot_sizes_that_differ() {
  std::mt19937 random(0);
  emulator::options() = {7, cuda::kOneShotMaxBlocks};
  const Shape shapes[] = {{2, 1024}, {3, 1024}};
  World world(2, shapes[1].state_bytes(), kShort);
  Call small(2, shapes[0], random), large(2, shapes[1], random);
  {
    emulator::Streams streams;
    world.launch(0, small);
    world.launch(1, large);
    streams.run();
  }
  small.check_poison(0);
  large.check_poison(1);
  CHECK(world.found(0, OneShotError::kDiffers) == 1, "");
}
