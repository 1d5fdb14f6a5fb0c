# SPDX-License-Identifier: BSD-3-Clause
"""Weights split over ranks: each reads, keeps and multiplies with its part of them.

The plan says what becomes of each module, `split` carries it out, `checkpoint` reads no more than
that from files, `load` makes a model of it, and the mesh holds the groups that exchange what the
parts then lack. `tree_attention.hf` has the functions to call: `from_pretrained` and `parallelize`.
"""

from .._loader import why_no_transformers

if (reason := why_no_transformers()) is not None:
    raise ImportError(reason)
