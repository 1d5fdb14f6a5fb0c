// SPDX-License-Identifier: BSD-3-Clause
#include "layouts.h"

#include <cute/arch/mma_sm90_gmma.hpp>
#include <cute/atom/mma_traits_sm90_gmma.hpp>
#include <cute/tensor.hpp>

namespace tree_attention::testing {
namespace {

using namespace cute;

template <GMMA::Major kMajor, int kRows, int kSizeK>
void visit_tile(const std::function<void(const CuteTile&)>& visit) {
  using Element = bfloat16_t;
  using Atom = GMMA::Layout_SW128_Atom<Element, kMajor>;
  alignas(1024) static Element memory[kRows * kSizeK];
  const auto layout = tile_to_shape(Atom{}, Shape<Int<kRows>, Int<kSizeK>>{});
  const auto tile = make_tensor(make_smem_ptr(memory), layout);
  const auto steps = zipped_divide(tile, Shape<Int<kRows>, _16>{});
  const auto descriptors = make_tensor<GMMA::smem_desc<kMajor>>(steps);
  visit({kMajor == GMMA::Major::MN, kRows, kSizeK,
         [&](int row, int k) {
           return static_cast<int>(reinterpret_cast<char*>(&tile(row, k)) -
                                   reinterpret_cast<char*>(memory));
         },
         [&](int step) { return static_cast<uint64_t>(descriptors(0, make_coord(0, step))); }});
}

template <typename Operation>
void visit_fragments(const std::function<void(int, int, int)>& visit) {
  using Traits = MMA_Traits<Operation>;
  constexpr int kN = size<1>(typename Traits::Shape_MNK{});
  for (int thread = 0; thread < 128; ++thread) {
    for (int i = 0; i < kN / 2; ++i) visit(thread, i, typename Traits::CLayout{}(thread, i));
  }
}

}  // namespace

void visit_cute_tiles(const std::function<void(const CuteTile&)>& visit) {
  constexpr auto kK = GMMA::Major::K, kM = GMMA::Major::MN;
  // a, then b, with 64 of k in a box.
  visit_tile<kK, 64, 64>(visit);
  visit_tile<kK, 16, 64>(visit);
  visit_tile<kK, 32, 64>(visit);
  // a of values, whose k are keys.
  visit_tile<kM, 64, 16>(visit);
  visit_tile<kM, 64, 64>(visit);
}

#define VISIT(n, type) visit_fragments<SM90_64x##n##x16_F32##type##type##_SS<kMajor, kMajor>>(visit)
#define VISIT_ALL(type) \
  VISIT(16, type);      \
  VISIT(32, type);      \
  VISIT(64, type)

void visit_cute_fragments(const std::function<void(int, int, int)>& visit) {
  constexpr auto kMajor = GMMA::Major::K;
  VISIT_ALL(BF16);
  VISIT_ALL(F16);
}

}  // namespace tree_attention::testing
