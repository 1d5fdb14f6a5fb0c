// SPDX-License-Identifier: BSD-3-Clause
//
// The published schedules: right where their assumptions hold, and a hang of LeanAttention's
// waiting fix-up where they do not, as lean_decode never does.
#include <cmath>
#include <cstring>
#include <vector>

#include "benchmarks/cuda/ablations/ablations.h"
#include "benchmarks/cuda/ablations/stamps.h"
#include "check.h"
#include "decode_case.h"
#include "machine.h"

namespace {

using tree_attention::DataType;
using tree_attention::DecodeParams;
using tree_attention::cuda::DeviceLimits;
using tree_attention::cuda::Plan;
using tree_attention::cuda::Workspace;
using tree_attention::testing::DecodeCase;
using tree_attention::testing::Shape;
namespace ablations = tree_attention::ablations;
namespace cuda = tree_attention::cuda;
namespace emulator = tree_attention::emulator;

constexpr DeviceLimits kDevice{5, 228 * 1024, 227 * 1024};

using MakePlan = Plan (*)(const DecodeParams&, const DeviceLimits&);
using Launch = cudaError_t (*)(const DecodeParams&, const Plan&, const Workspace&, cudaStream_t);

auto launcher(MakePlan make_plan, Launch launch, std::vector<uint32_t>& counters) {
  return [=, &counters](const DecodeParams& params) {
    const Plan plan = make_plan(params, kDevice);
    counters.assign(plan.workspace.num_counters, 0);
    std::vector<float> partials(plan.workspace.num_partial_floats, NAN);
    launch(params, plan, {counters.data(), partials.data()}, nullptr);
  };
}

const Shape kShapes[] = {
    {1, 2, 4, 1, 1000, 64, 64, DataType::kBFloat16},
    {3, 1, 4, 2, 400, 128, 128, DataType::kBFloat16, 0, false, 0.0f, true},
    {2, 2, 2, 1, 320, 72, 96, DataType::kBFloat16},
    {2, 2, 2, 1, 320, 128, 96, DataType::kBFloat16, 64, true, 3.0f, true},
    {6, 2, 1, 1, 90, 64, 64, DataType::kBFloat16, 0, false, 0.0f, true},
    {1, 1, 3, 1, 128 * 40, 64, 64, DataType::kBFloat16},
};

}  // namespace

void test_equal_splits() {
  std::vector<uint32_t> counters;
  for (const Shape& shape : kShapes) {
    emulator::options() = {1, 3};
    DecodeCase(shape, 1).check(
        0, launcher(ablations::plan_equal_splits, ablations::launch_equal_splits, counters));
  }
}

void test_waiting_fixup() {
  std::vector<uint32_t> counters;
  for (const Shape& shape : kShapes) {
    for (const int num_workers : {0, 2, 40}) {
      emulator::options() = {2, 40};
      DecodeCase decode(shape, 1);
      decode.check(num_workers,
                   launcher(cuda::plan_lean_decode, ablations::launch_waiting_fixup, counters));
      for (const uint32_t counter : counters) CHECK(counter == 0, "a counter ends as ", counter);
      const std::vector<float> o = decode.o();
      decode.check(num_workers,
                   launcher(cuda::plan_lean_decode, cuda::launch_lean_decode, counters));
      CHECK(std::memcmp(o.data(), decode.o().data(), o.size() * sizeof(float)) == 0,
            "the bits are not lean_decode's");
    }
  }
}

void test_waiting_fixup_hangs() {
  std::vector<uint32_t> counters;
  int hangs = 0;
  for (uint64_t seed = 0; seed < 8; ++seed) {
    emulator::options() = {seed, 1};  // one block at a time
    DecodeCase decode({1, 1, 4, 1, 128 * 3, 64, 64, DataType::kBFloat16}, 1);
    decode.check(3, launcher(cuda::plan_lean_decode, cuda::launch_lean_decode, counters));
    try {
      decode.check(3, launcher(cuda::plan_lean_decode, ablations::launch_waiting_fixup, counters));
    } catch (const emulator::Error&) {
      ++hangs;
    }
  }
  CHECK(hangs > 0, "no order of blocks made it wait for ever");
}

void test_stamped() {
  Shape latents{1, 1, 16, 1, 32 * 40, 576, 512, DataType::kBFloat16};
  latents.latents = true;
  const Shape stamped_shapes[] = {
      {1, 2, 4, 1, 1000, 128, 128, DataType::kBFloat16},
      {3, 1, 4, 2, 400, 128, 128, DataType::kBFloat16, 0, false, 0.0f, true},
      {1, 1, 4, 1, 64 * 80, 128, 128, DataType::kBFloat16},
      {1, 1, 4, 12, 64 * 40, 128, 128, DataType::kBFloat16},
      latents,
  };
  using ablations::BlockStamps;
  std::vector<uint32_t> counters;
  int merges = 0, merges_above = 0;
  for (const Shape& shape : stamped_shapes) {
    for (const int num_workers : {0, 2, 40}) {
      emulator::options() = {3, 40};
      DecodeCase decode(shape, 1);
      std::vector<BlockStamps> stamps;
      const auto launch = [&](const DecodeParams& params, const Plan& plan,
                              const Workspace& workspace, cudaStream_t stream) {
        stamps.assign(plan.num_workers, {});
        return ablations::launch_stamped(params, plan, workspace, stream, stamps.data());
      };
      const auto run = [&](const auto& launch_one) {
        decode.check(num_workers, [&](const DecodeParams& params) {
          const Plan plan = cuda::plan_lean_decode(params, kDevice);
          counters.assign(plan.workspace.num_counters, 0);
          std::vector<float> partials(plan.workspace.num_partial_floats, NAN);
          CHECK(launch_one(params, plan, {counters.data(), partials.data()}, nullptr) == 0,
                "no such kernel");
        });
        return decode.o();
      };
      const std::vector<float> o = run(launch);
      CHECK(std::memcmp(o.data(), run(cuda::launch_lean_decode).data(), o.size() * 4) == 0,
            "the bits are not lean_decode's");
      for (const BlockStamps& block : stamps) {
        const auto passed = [&](int place) { return block.places[place].cycles > 0; };
        CHECK(passed(ablations::kStart) && passed(ablations::kWaited) && passed(ablations::kEnd),
              "a block has no beginning or no end");
        CHECK(passed(ablations::kCut) || !passed(ablations::kFirstOutput),
              "a block without a range has an output");
        uint64_t last = 0;
        for (const ablations::Stamp& stamp : block.places) {
          if (stamp.cycles == 0) continue;
          CHECK(last < stamp.cycles && stamp.cycles < stamp.nanoseconds, "stamps go back");
          last = stamp.nanoseconds;
        }
        for (int i = 0; i < ablations::kStampedOutputs; ++i) {
          const int first = ablations::kFirstOutput + i * ablations::kPlacesOfOutput;
          for (int place = 1; place <= ablations::kCombined; ++place) {
            CHECK(passed(first + place) == passed(first), "an output has a part of its stamps");
          }
          merges += passed(first + ablations::kMerged);
          merges_above += passed(first + ablations::kMergedAbove);
        }
      }
    }
  }
  CHECK(merges > merges_above && merges_above > 0, "no two levels were stamped");
}
