# SPDX-License-Identifier: BSD-3-Clause
"""Definitions in plain float64 PyTorch of everything that the kernels and exchanges compute.

The tests compare with them and the documentation prints them. They do without the compiled
extension:

- `attention`, `merge`, `merge_states`: the local operator and the combination of partial states.
- `quantise`: keys and values of 8 bits with a scale per token and head.
- `tree_attention.reference.accuracy`: the error of a result against them, and its bound.
- `tree_attention.reference.conformance`: whether the merge and the sharded decoding of any engine
  are right where such code often is not.

The papers' own algorithms are in `papers/`:

- `papers.energy`: attention as the gradient of an energy, and `moments`: higher
  moments of the values, and the output projection inside them.
- `papers.flash`: attention in blocks, from the formula and Rabe and Staats over
  FlashAttention and FlashAttention-2 to FlashDecoding, with counted slow-memory traffic.
- `papers.gradient`: gradients through the merge and through attention over
  shards, by the tree and by the ring.
- `papers.lean`: LeanAttention's Algorithms 2, 3 and 4, and `stream_k`: the index
  arithmetic of the last, as printed and corrected, with a checker.
- `papers.lsh`: Reformer's attention by hashing, whose rounds merge as shards do.
- `running`: the running softmax, in which those keep their states.
- `papers.tree` and `ring`: Tree Attention's Algorithms 1, 2 and 3, reductions
  with any fan-in, and Ring Attention, over a list of shards, with `counts` of steps and bytes.
"""

from tree_attention.reference.attention import attention, merge, merge_states
from tree_attention.reference.quantisation import quantise

__all__ = ["attention", "merge", "merge_states", "quantise"]
