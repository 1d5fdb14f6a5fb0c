# SPDX-License-Identifier: BSD-3-Clause
"""The layers of a cache, by what the layers of a model keep."""

from typing import Any

import torch
from transformers.configuration_utils import PreTrainedConfig

from .fixed import Progress, StaticLatentLayer, StaticTreeCacheLayer
from .growing import TreeCacheLayer
from .latent import LatentLayer
from .recurrent import OF_THEIR_OWN, STATE_LAYERS, new_state_layer
from .shard import Shard
from .window import WindowLayer

# Chunked layers work as long as one chunk covers all keys; the mask refuses them after that.
_KEY_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}
_LAYER_TYPES = _KEY_LAYERS | STATE_LAYERS.keys()


def new_layers(
    config: PreTrainedConfig,
    shard: Shard,
    growth: int,
    kv_dtype: torch.dtype | None,
    max_length: int | None,
) -> list[Any]:
    """The layers of a `TreeCache` with these arguments, or ValueError."""
    kinds = _layer_kinds(config)
    kv = [i for i, kind in enumerate(kinds) if kind not in STATE_LAYERS]
    progress = None
    if max_length is not None:
        shard.check_holds(max_length)
        progress = Progress(max_length)
    kv_lora_rank = getattr(config, "kv_lora_rank", None)
    window = getattr(config, "sliding_window", None)
    layers: list[Any] = []
    for i, kind in enumerate(kinds):
        ends = {"is_first": i == kv[0], "is_last": i == kv[-1]}
        layer: Any
        if kind in STATE_LAYERS:
            layer = new_state_layer(config, kind)
        elif progress is not None and kv_lora_rank is not None:
            layer = StaticLatentLayer(shard, progress, kv_dtype, kv_lora_rank=kv_lora_rank, **ends)
        elif progress is not None:
            layer = StaticTreeCacheLayer(shard, progress, kv_dtype, **ends)
        elif kv_lora_rank is not None:
            layer = LatentLayer(shard, growth, kv_dtype, kv_lora_rank=kv_lora_rank)
        elif kind == "sliding_attention" and window is not None:
            layer = WindowLayer(shard, growth, window, kv_dtype)
        else:
            layer = TreeCacheLayer(shard, growth, kv_dtype)
        layers.append(layer)
    if shard.deterministic:
        _check_deterministic(layers)
    return layers


def _check_deterministic(layers: list[Any]) -> None:
    # A matrix product that makes keys of latents may round otherwise for another number of rows,
    # and a window begins in the middle of a block.
    for layer in layers:
        if isinstance(layer, LatentLayer):
            raise ValueError("TreeCache: deterministic is not supported with latent attention")
        if isinstance(layer, WindowLayer):
            raise ValueError(
                "TreeCache: deterministic needs a max_length, as the model has layers with a "
                f"sliding window of {layer.window}, got max_length=None"
            )


def _layer_kinds(config: PreTrainedConfig) -> list[str]:
    name = config.model_type
    if config.is_encoder_decoder or config.get_text_config(decoder=True) is not config:
        raise ValueError(f"TreeCache: the model must be a decoder of text alone, got {name!r}")
    unknown = set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES
    if unknown:
        raise ValueError(
            f"TreeCache: layers must be of the types {', '.join(sorted(_LAYER_TYPES))}; "
            f"{name!r} has {', '.join(sorted(unknown))}"
        )
    if getattr(config, "num_kv_shared_layers", None):
        raise ValueError(
            f"TreeCache: every layer must have keys of its own; {name!r} shares keys between layers"
        )
    if name in OF_THEIR_OWN:
        raise ValueError(
            f"TreeCache: {name!r} takes only a cache of the class that transformers has for it"
        )
    kinds = getattr(config, "layer_types", None)
    if kinds is None:  # then all layers are of one kind, where a window is for all
        kinds = ["sliding_attention"] * config.num_hidden_layers
    if not _KEY_LAYERS & {*kinds}:
        raise ValueError(
            f"TreeCache: a layer must have keys to spread over ranks; those of {name!r} are "
            f"{', '.join(sorted({*kinds}))}"
        )
    return list(kinds)
