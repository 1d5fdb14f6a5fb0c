# SPDX-License-Identifier: BSD-3-Clause
"""The methods of a model that are replaced while it is enabled."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ..weights.text import text_of
from .cache.latent import EXPAND, expand_unless_sharded
from .generate import REPLACEMENTS, Setup
from .overrides import override, restore
from .own_attention import FORWARDS, INDEXERS, choose_blocks, own_forward
from .prompts.forward import split_forward
from .text import text_alone

# An attribute of an enabled model.
_PREVIOUS = "_attention_before_enable"


def is_enabled(model: PreTrainedModel) -> bool:
    """True where `enable` is in force."""
    return _PREVIOUS in vars(model)


def patch(model: PreTrainedModel, setup: Setup, splits_prompts: bool) -> None:
    """Makes a model that was checked attend and generate over ranks."""
    if is_enabled(model):  # until now, so that wrong options leave it as it was
        unpatch(model)
    text = text_of(model)
    previous = text.config._attn_implementation
    _choose_attention(text, "tree_attention")
    if text.config._attn_implementation != "tree_attention":
        raise ValueError(
            f"enable: {type(model).__name__} does not let its attention be chosen "
            "(see AttentionInterface in the documentation of transformers)"
        )
    vars(model)[_PREVIOUS] = previous
    for module, name, replacement in _of_attention(text):
        override(module, name, replacement)
    for name, replacement in REPLACEMENTS.items():
        override(model, name, functools.partial(replacement, setup))
    if splits_prompts:
        kind, config = type(model), model.config
        split = split_forward(kind, config, setup.prefill, setup.prompt_shares)
        override(model, "forward", split)
    if text is not model:
        override(model, "forward", text_alone(model))


def unpatch(model: PreTrainedModel) -> None:
    """Undoes `patch`."""
    text = text_of(model)
    _choose_attention(text, vars(model).pop(_PREVIOUS))
    for module, name, _ in _of_attention(text):
        restore(module, name)
    for name in (*REPLACEMENTS, "forward"):
        restore(model, name)


def _choose_attention(model: PreTrainedModel, implementation: str) -> None:
    """Sets the attention implementation of a model, also where transformers does not let it be."""
    if any(type(module).__name__ in FORWARDS for module in model.modules()):
        model.config._attn_implementation = implementation  # transformers makes the mask for it
        return
    chosen = model.config
    model.set_attn_implementation(implementation)
    # Layers that a caller copied, as to make a model deeper, have copies of the configuration.
    configs = (getattr(module, "config", None) for module in model.modules())
    for config in configs:
        if isinstance(config, type(chosen)) and config is not chosen:
            config._attn_implementation = chosen._attn_implementation


def _of_attention(model: PreTrainedModel) -> Iterator[tuple[nn.Module, str, Callable[..., Any]]]:
    """The methods of a model's attention modules that are replaced, and what takes their place."""
    for module in model.modules():
        if type(module).__name__ in FORWARDS:
            yield module, "forward", own_forward
        if type(module).__name__ in INDEXERS:
            yield module, "forward", choose_blocks
        if hasattr(type(module), EXPAND):
            yield module, EXPAND, expand_unless_sharded
