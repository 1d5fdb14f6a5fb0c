# SPDX-License-Identifier: BSD-3-Clause
"""Layers of hybrid models that keep a state, or nothing, in place of keys and values.

They are transformers' own, the same on every rank: a state is small and needs all tokens in order.
"""

from __future__ import annotations

from typing import Any

from transformers import cache_utils
from transformers.configuration_utils import PreTrainedConfig

_STATES = ("linear_attention", "conv")
# Layers without attention.
_NOTHING = ("moe", "mlp")

# Models whose layers go on from a state with several tokens, so that prompts may be read in chunks.
# The layers of other models, as Bamba and Jamba, forget the state with every chunk in transformers
# 5.23.
GO_ON_FROM_A_STATE = {
    "granitemoehybrid",
    "lfm2",
    "lfm2_moe",
    "lfm3",
    "nemotron_h",
    "olmo_hybrid",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_next",
}
# Models whose layers work with transformers' cache for that model alone.
OF_THEIR_OWN = {"minimax"}


_CLASSES: dict[str, type[Any]] = getattr(cache_utils, "DYNAMIC_LAYER_TYPE_MAPPING", {})
_NAMES = {kind: kind for kind in _STATES} | dict.fromkeys(_NOTHING, "dummy")
# The class of transformers for each kind, of those that this release has.
STATE_LAYERS = {kind: _CLASSES[name] for kind, name in _NAMES.items() if name in _CLASSES}


def new_state_layer(config: PreTrainedConfig, kind: str) -> Any:
    """A layer of a kind in `STATE_LAYERS`."""
    return STATE_LAYERS[kind](number_of_states=getattr(config, "number_of_conv_states", 1))


def keeps_state(layer: Any) -> bool:
    return hasattr(layer, "recurrent_states")


def state_kinds(config: PreTrainedConfig) -> list[str]:
    """The kinds of layers that keep a state of all tokens before, in a model."""
    return sorted({*(getattr(config, "layer_types", None) or ())} & {*_STATES})
