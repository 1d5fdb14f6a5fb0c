# SPDX-License-Identifier: BSD-3-Clause
"""The figures and tables of the Tree Attention and LeanAttention papers: published beside ours.

`python -m lab.papers --help` lists those that arithmetic and simulation reproduce anywhere.
`python -m lab.papers.protocol` measures Tree Attention's tables on the ranks of torchrun.
`theorem1`, `slow_memory`, `algorithm_4` and `lsh` count what `tree_attention.reference` does.
"""
