# SPDX-License-Identifier: BSD-3-Clause
"""Definitions in plain float64 PyTorch of everything that the kernels and exchanges compute.

The tests compare with them and the documentation prints them. They do without the compiled
extension. `accuracy` has the error of a result against them and its bound, and `conformance` checks
the merge and the sharded decoding of any engine.
"""

from .attention import attention, merge, merge_states, quantise
from .choice import index_topk, merge_topk

__all__ = ["attention", "index_topk", "merge", "merge_states", "merge_topk", "quantise"]
