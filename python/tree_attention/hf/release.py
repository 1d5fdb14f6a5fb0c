# SPDX-License-Identifier: BSD-3-Clause
"""The installed release of transformers: its name of the cache, and whether it is tested."""

import inspect

import transformers
from transformers import GenerationMixin

from .._loader import beyond_tested_transformers

OLD_CACHE_NAME = "past_key_values"
_parameters = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
# The name of the cache among the arguments of models and of `generate`, and in their outputs.
# transformers 5.24 renamed it and takes the old one from callers alone: what `generate` hands from
# step to step has the new one.
CACHE_NAME = "cache" if "cache" in _parameters else OLD_CACHE_NAME


def generate_without_enable() -> str:
    """The advice where transformers does not do what an enabled model needs."""
    note = beyond_tested_transformers(transformers.__version__)
    about = f"; transformers is {transformers.__version__}{note}" if note else ""
    return "generate without enable" + about
