# SPDX-License-Identifier: BSD-3-Clause
"""Exact attention for very long contexts whose key/value cache is split over ranks."""

import importlib
import os
import sys
from types import ModuleType

# True under `python -m tree_attention`, whatever options of Python stand before -m.
if sys.argv[:1] == ["-m"] and sys.orig_argv[-len(sys.argv)].removeprefix("-m") == "tree_attention":
    # `python -m tree_attention` tells errors in sentences, and torch's C++ log would put its stack
    # in front of each that comes of a lost rank. torch reads this once, when it is imported.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")

from ._loader import __version__
from .baselines import ring_decode, ring_pass_q_decode
from .decode import tree_decode
from .exchange import Communicator, ExchangeError, all_merge_states, strategies
from .ops import append_kv, lean_decode, lean_schedule, merge_states, reset_workspaces
from .options import AttentionOptions
from .sharding import BlockCyclic, Contiguous, ContiguousThenCyclic, ShardLayout

__all__ = [
    "AttentionOptions",
    "BlockCyclic",
    "Communicator",
    "Contiguous",
    "ContiguousThenCyclic",
    "ExchangeError",
    "ShardLayout",
    "__version__",
    "all_merge_states",
    "append_kv",
    "lean_decode",
    "lean_schedule",
    "merge_states",
    "reset_workspaces",
    "ring_decode",
    "ring_pass_q_decode",
    "strategies",
    "tree_decode",
]


def __getattr__(name: str) -> ModuleType:
    """`tree_attention.hf`, `patterns`, `positions`, `reference` are imported when first used."""
    if name in ("hf", "patterns", "positions", "reference"):
        return importlib.import_module(f"tree_attention.{name}")
    raise AttributeError(f"module 'tree_attention' has no attribute {name!r}")
