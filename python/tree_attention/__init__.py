# SPDX-License-Identifier: BSD-3-Clause
"""Exact attention for very long contexts whose key/value cache is split over ranks.

Which part is for whom:

- You have a HuggingFace model: `tree_attention.hf` has `from_pretrained` and `enable`, after which
  `model.generate(...)` runs on all ranks.
- You write an inference engine: `lean_decode` attends to the keys of one rank, `all_merge_states`
  merges the results of all ranks, and `tree_decode` does both. `append_kv` writes new keys into a
  cache, `merge_states` merges results in one process, `cascade_decode` reads pages that sequences
  begin with in common once, as `page_groups` finds them, and `AttentionOptions` lists the keyword
  arguments. Where a model chooses its keys, `index_topk` chooses among those of one rank, and
  `all_merge_topk` or `merge_topk` merges choices. `BlockCyclic`, `Contiguous` and
  `ContiguousThenCyclic`, each a `ShardLayout`, say which rank holds which token. A `Communicator`
  keeps connections between calls, `strategies` names the ways to exchange, and an `ExchangeError`
  tells of a lost rank.
- You want sparse patterns or biases by position: `tree_attention.patterns` and
  `tree_attention.positions`.
- You check an engine's own merge: `tree_attention.reference.conformance`; the definitions in
  float64 are in `tree_attention.reference`.
- You compare: `ring_decode` and `ring_pass_q_decode` are ring attention, and `lean_schedule` is the
  kernels' partition of the work. `reset_workspaces` is for CUDA after an aborted launch.
- You serve with vLLM: `python -m tree_attention.vllm serve MODEL`.
- You want none of this in Python: `tree-attention --help` lists the commands.
"""

import importlib
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ._loader import __version__, load

if TYPE_CHECKING:
    from .baselines import ring_decode, ring_pass_q_decode
    from .cascade import cascade_decode, page_groups
    from .decode import tree_decode
    from .exchange import (
        Communicator,
        ExchangeError,
        StrategyName,
        all_merge_states,
        all_merge_topk,
    )
    from .index import index_topk, merge_topk
    from .ops import append_kv, lean_decode, lean_schedule, merge_states, reset_workspaces
    from .options import AttentionOptions
    from .sharding import BlockCyclic, Contiguous, ContiguousThenCyclic, ShardLayout

    # Written out, as type checkers take `exchange.strategies` for the folder of that name.
    def strategies() -> tuple[StrategyName, ...]: ...


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
    "all_merge_topk",
    "append_kv",
    "cascade_decode",
    "index_topk",
    "lean_decode",
    "lean_schedule",
    "merge_states",
    "merge_topk",
    "page_groups",
    "reset_workspaces",
    "ring_decode",
    "ring_pass_q_decode",
    "strategies",
    "tree_decode",
]

# The modules that define the names above. Each imports only modules that stand before it here.
_WITH_NAMES = ("sharding", "options", "ops", "index", "cascade", "exchange", "decode", "baselines")
_OTHERS = ("hf", "patterns", "positions", "reference")


def __getattr__(name: str) -> Any:
    """Imports the module of a name when the name is first used: plans, versions and the conformance
    kit need no extension, and plans no torch."""
    if name in __all__:
        for module in _WITH_NAMES:
            names = vars(importlib.import_module(f"{__name__}.{module}"))
            if name in names:
                globals()[name] = names[name]
                return names[name]
    if name in _WITH_NAMES + _OTHERS:
        return importlib.import_module(f"{__name__}.{name}")
    if name == "_C":
        return load()  # and not as Python would, which checks nothing
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_OTHERS})


if "torch" in sys.modules:
    # A program that has imported torch may ask torch.ops.tree_attention for an operator, without a
    # name of this package. An error in the extension is told where an operator is used.
    with suppress(ImportError):
        importlib.import_module(f"{__name__}.ops")
