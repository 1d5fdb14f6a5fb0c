# SPDX-License-Identifier: BSD-3-Clause
"""transformers models with their key/value cache sharded over ranks.

Importing this module registers the attention implementation `"tree_attention"`::

    import tree_attention.hf

    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="tree_attention")
    tree_attention.hf.enable(model)                     # on every rank
    model.generate(**inputs, max_new_tokens=100)        # on every rank, the same inputs

`from_pretrained` loads a model so that every rank holds a part of the weights. `parallelize` splits
a model that is in memory, and `mesh` has the groups of such a model. `seed_ranks` makes ranks draw
the same tokens, and `disable` undoes `enable`. A `TreeCache` is the cache that `generate` makes.
`find_prefix` finds the saved cache that holds the most of a text.

Works with transformers 5.5 and later; tested with 5.17, 5.23 and 5.24.
"""

from .._loader import why_no_transformers

if (reason := why_no_transformers()) is not None:
    raise ImportError(reason)

from ..weights.split import mesh
from .cache.growing import WrongAttentionError
from .cache.snapshot.tokens import find_prefix
from .cache.tree_cache import TreeCache
from .enable import disable, enable
from .release import CACHE_NAME
from .sampling import SynchronizeLogits, seed_ranks
from .tensor_parallel import from_pretrained, parallelize

__all__ = [
    "CACHE_NAME",
    "SynchronizeLogits",
    "TreeCache",
    "WrongAttentionError",
    "disable",
    "enable",
    "find_prefix",
    "from_pretrained",
    "mesh",
    "parallelize",
    "seed_ranks",
]
