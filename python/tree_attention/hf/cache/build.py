# SPDX-License-Identifier: BSD-3-Clause
"""The layers of a cache, by what the layers of a model keep.

Those that keep a state, or nothing, in place of keys and values are transformers' own, the same on
every rank: a state is small and needs all tokens in order.
"""

from typing import Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, cache_utils
from transformers.configuration_utils import PreTrainedConfig

from .fixed import Progress, StaticLatentLayer, StaticTreeCacheLayer
from .growing import TreeCacheLayer
from .latent import LatentLayer
from .shard import Shard
from .window import StaticWindowLayer, WindowLayer

_STATES = ("linear_attention", "conv")
_CLASSES: dict[str, type[Any]] = getattr(cache_utils, "DYNAMIC_LAYER_TYPE_MAPPING", {})
_NAMES = {kind: kind for kind in _STATES} | dict.fromkeys(("moe", "mlp"), "dummy")
# The class of transformers for each kind of layer without keys that this release has.
_STATE_LAYERS = {kind: _CLASSES[name] for kind, name in _NAMES.items() if name in _CLASSES}
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
_OF_THEIR_OWN = {"minimax"}
# Chunked layers work as long as one chunk covers all keys; the mask refuses them after that.
_KEY_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}
_LAYER_TYPES = _KEY_LAYERS | _STATE_LAYERS.keys()


def new_layers(
    config: PreTrainedConfig,
    shard: Shard,
    growth: int,
    kv_dtype: torch.dtype | None,
    max_length: int | None,
) -> list[Any]:
    """The layers of a `TreeCache` with these arguments, or ValueError."""
    is_fixed = max_length is not None
    size: Any = growth
    if max_length is not None:
        shard.check_holds(max_length)
        size = Progress(max_length)
    rank = getattr(config, "kv_lora_rank", None)
    window: Any = getattr(config, "sliding_window", None)
    # A ring begins in the middle of a block.
    is_whole = window is None or (shard.blocks.size > 0 and is_fixed)
    layers: list[Any] = []
    for kind in _layer_kinds(config):
        if kind in _STATE_LAYERS:
            number = getattr(config, "number_of_conv_states", 1)
            layers.append(_STATE_LAYERS[kind](number_of_states=number))
        elif rank is not None:
            latents = (LatentLayer, StaticLatentLayer)[is_fixed]
            layers.append(latents(shard, size, kv_dtype, kv_lora_rank=rank))
        elif kind == "sliding_attention" and not is_whole:
            ring = (WindowLayer, StaticWindowLayer)[is_fixed]
            layers.append(ring(shard, size, kv_dtype, window=window))
        else:
            layers.append((TreeCacheLayer, StaticTreeCacheLayer)[is_fixed](shard, size, kv_dtype))
    if any(keeps_state(layer) for layer in layers):
        for layer in layers:
            layer.is_beside_states = True
    if is_fixed:
        _note_first_allocations(layers)
    # A matrix product that makes keys of latents may round otherwise for another number of rows.
    if shard.blocks.size and rank is not None:
        raise shard.blocks.refusal("TreeCache", "is not supported with latent attention")
    if shard.blocks.size and any(isinstance(layer, WindowLayer) for layer in layers):
        raise shard.blocks.refusal(
            "TreeCache",
            f"needs a max_length, as the model has layers with a sliding window of {window}, got "
            "max_length=None",
        )
    return layers


def _note_first_allocations(layers: list[Any]) -> None:
    """Tells the first layer of each kind, whose rows are of one size, how many there are."""
    kinds: dict[Any, list[TreeCacheLayer]] = {}
    for layer in layers:
        if isinstance(layer, TreeCacheLayer):
            kinds.setdefault((type(layer), layer.window), []).append(layer)
    for first, *others in kinds.values():
        first.allocates_for = 1 + len(others)


def _layer_kinds(config: PreTrainedConfig) -> list[str]:
    """The kind of each layer of a model that can have a `TreeCache`, or ValueError."""
    name, kinds = config.model_type, _kinds_that_run(config)
    # Configurations of several models need not have a number of layers.
    if config.is_encoder_decoder or config.get_text_config(decoder=True) is not config:
        text = type(config.get_text_config(decoder=True))
        way_on = ""
        if text in MODEL_FOR_CAUSAL_LM_MAPPING and not config.is_encoder_decoder:
            kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[text]
            way_on = f"; its text is a {kind.__name__}, which hf.from_pretrained(path) reads alone"
        raise ValueError(
            f"TreeCache: the model must be a decoder of text alone, got {name!r}{way_on}"
        )
    if kinds is None:  # then all layers are of one kind, where a window is for all
        kinds = ["sliding_attention"] * config.num_hidden_layers
    unknown = {*kinds} - _LAYER_TYPES
    error = None
    if unknown:
        error = f"layers must be of the types {', '.join(sorted(_LAYER_TYPES))}; "
        error += f"{name!r} has {', '.join(sorted(unknown))}"
    elif getattr(config, "num_kv_shared_layers", None):
        error = f"every layer must have keys of its own; {name!r} shares keys between layers"
    elif name in _OF_THEIR_OWN:
        error = f"{name!r} takes only a cache of the class that transformers has for it"
    elif not _KEY_LAYERS & {*kinds}:
        error = "a layer must have keys to spread over ranks; those of "
        error += f"{name!r} are {', '.join(sorted({*kinds}))}"
    if error is not None:
        raise ValueError(f"TreeCache: {error}")
    return list(kinds)


def state_kinds(config: PreTrainedConfig) -> list[str]:
    """The kinds of layers that keep a state of all tokens before, in a model."""
    return sorted({*(_kinds_that_run(config) or ())} & {*_STATES})


def _kinds_that_run(config: PreTrainedConfig) -> list[str] | None:
    """The kinds of the layers, where the configuration has them, that transformers runs: a model
    may be cut after it was loaded."""
    kinds = getattr(config, "layer_types", None)
    return None if kinds is None else list(kinds[: config.num_hidden_layers])


def keeps_state(layer: Any) -> bool:
    return hasattr(layer, "recurrent_states")
