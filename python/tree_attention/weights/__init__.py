# SPDX-License-Identifier: BSD-3-Clause
"""Weights split over ranks: each reads, keeps and multiplies with its part of them.

The plan says what becomes of each module, and `split` carries it out. `checkpoint` reads a rank's
parts from files, and nothing else. `load` makes a model of them. The mesh holds the groups over
which ranks exchange what their parts lack. `tree_attention.hf` has the functions to call:
`from_pretrained` and `parallelize`.
"""

from .._loader import why_no_transformers

if (reason := why_no_transformers()) is not None:
    raise ImportError(reason)
