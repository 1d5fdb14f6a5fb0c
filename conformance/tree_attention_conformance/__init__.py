# SPDX-License-Identifier: BSD-3-Clause
"""Checks of an engine's merge, decoding and choice over shards, where such code is often wrong.

`check_merge`, `check_sharded_decode` and `check_choice` call a function of any engine on cases that
are known to go wrong, compare with float64 and return a `Report`, which prints a line per case and
one diagnosis per mistake. Where the function is a collective, every rank makes the same call.
`adapt` makes functions of the kit's conventions.
"""

from .adapters import adapt
from .cases import DECODE_CASES, MERGE_CASES, DecodeProblem
from .check import check_merge, check_sharded_decode
from .choice import CHOICE_CASES, ChoiceProblem, check_choice
from .diagnosis import Line, Report

__version__ = "0.1.0"
__all__ = [
    "CHOICE_CASES",
    "DECODE_CASES",
    "MERGE_CASES",
    "ChoiceProblem",
    "DecodeProblem",
    "Line",
    "Report",
    "adapt",
    "check_choice",
    "check_merge",
    "check_sharded_decode",
]
