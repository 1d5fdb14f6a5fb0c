# SPDX-License-Identifier: BSD-3-Clause
"""transformers models with their key/value cache sharded over ranks.

Importing this module registers the attention implementation `"tree_attention"`::

    import tree_attention.hf

    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="tree_attention")
    tree_attention.hf.enable(model)                     # on every rank
    model.generate(**inputs, max_new_tokens=100)        # on every rank, the same inputs

Works with transformers 5.5 and later; tested with 5.17, 5.23 and 5.24.
"""

from .._loader import INSTALL_TRANSFORMERS, MINIMUM_TRANSFORMERS

try:
    import transformers
except ImportError as error:
    raise ImportError(
        f"tree_attention.hf needs transformers >= {MINIMUM_TRANSFORMERS}: {INSTALL_TRANSFORMERS}"
    ) from error
from packaging.version import Version

if Version(transformers.__version__) < Version(MINIMUM_TRANSFORMERS):
    raise ImportError(
        f"tree_attention.hf needs transformers >= {MINIMUM_TRANSFORMERS}, "
        f"got {transformers.__version__}: {INSTALL_TRANSFORMERS}"
    )

from transformers import AttentionInterface, AttentionMaskInterface

from .attention import tree_attention_forward
from .cache.growing import WrongAttentionError
from .cache.tree_cache import TreeCache
from .enable import disable, enable
from .masks import tree_attention_mask
from .sampling import SynchronizeLogits, seed_ranks
from .tensor_parallel import from_pretrained, parallelize
from .weights.split import mesh

AttentionInterface.register("tree_attention", tree_attention_forward)
AttentionMaskInterface.register("tree_attention", tree_attention_mask)

__all__ = [
    "SynchronizeLogits",
    "TreeCache",
    "WrongAttentionError",
    "disable",
    "enable",
    "from_pretrained",
    "mesh",
    "parallelize",
    "seed_ranks",
]
