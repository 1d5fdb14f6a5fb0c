// SPDX-License-Identifier: BSD-3-Clause
//
// The schedule of csrc/cpu/decode.cpp with tiles of TILE_KEYS keys, in a namespace of its own, and
// its operator. All headers are included before.
#define JOIN_TOKENS(a, b) a##b
#define JOIN(a, b) JOIN_TOKENS(a, b)
#define NAMESPACE JOIN(keys_, TILE_KEYS)

namespace NAMESPACE {
using namespace ::tree_attention;
using namespace ::tree_attention::cpu;

// Hides the product's, which a look-up from here finds later.
constexpr int kTileKeys = TILE_KEYS;

#include "cpu/decode.cpp"

}  // namespace NAMESPACE

TORCH_LIBRARY_FRAGMENT(tree_attention_tiles, m) {
  m.def(C10_STRINGIZE(NAMESPACE) "(" TREE_ATTENTION_DECODE_ARGUMENTS ") -> (Tensor o, Tensor lse)",
        tree_attention::LeanDecode<NAMESPACE::tree_attention::cpu::lean_decode,
                                   tree_attention::cpu::merge_states>::run);
}

#undef NAMESPACE
#undef JOIN
#undef JOIN_TOKENS
#undef TILE_KEYS
