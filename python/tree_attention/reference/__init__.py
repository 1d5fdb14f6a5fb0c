# SPDX-License-Identifier: BSD-3-Clause
"""Plain-PyTorch float64 definitions of everything the kernels and exchanges compute.

They are the truth of the tests and the text of the documentation, and make no use of the compiled
extension: `attention` is the local operator, `merge_states` the combination of partial states.
"""

from tree_attention.reference.attention import attention, merge, merge_states

__all__ = ["attention", "merge", "merge_states"]
