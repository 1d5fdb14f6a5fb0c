# SPDX-License-Identifier: BSD-3-Clause
"""The layers of a cache, by what the layers of a model keep.

Those that keep a state, or nothing, in place of keys and values are transformers' own, the same on
every rank: a state is small and needs all tokens in order.
"""

from typing import Any

import torch
import transformers
from packaging.version import Version
from transformers import cache_utils
from transformers.configuration_utils import PreTrainedConfig

from ...weights.text import text_config
from .chosen_keys import (
    BlockLayer,
    Index,
    IndexedLatentLayer,
    StaticBlockLayer,
    StaticIndexedLatentLayer,
)
from .far import FarLayer
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
# Models whose layers go on from a state with several tokens. Jamba's layers begin with an empty
# state at each pass of several (read in transformers 5.17 to 5.24), as most models' did in 5.5.
_GO_ON_FROM_A_STATE = {
    "bamba",
    "granitemoehybrid",
    "kimi_linear",
    "lfm2",
    "lfm2_moe",
    "lfm3",
    "nemotron_h",
    "olmo_hybrid",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_next",
}
_DO_GO_ON = Version(transformers.__version__) >= Version("5.17")
# Models whose layers work with transformers' cache for that model alone.
_OF_THEIR_OWN = {"minimax"}
# Models with an index that chooses among keys of another form than the layer's own.
_OTHER_INDEXES = {
    "deepseek_v4": "keeps compressed keys in addition to the keys of its window",
    "glm5_next_text": "chooses pools of keys, next to layers that keep states",
    "qwen4_exp_text": "chooses keys in code of its own, next to layers that keep states",
}
# An index chooses the keys of each query, or blocks of them for each head.
INDEXED, BLOCKS = "indexed_attention", "minimax_m3_sparse"
# Chunked layers work as long as one chunk covers all keys; the mask refuses them after that.
_KEY_LAYERS = {"full_attention", "sliding_attention", "chunked_attention", INDEXED, BLOCKS}
_LAYER_TYPES = _KEY_LAYERS | _STATE_LAYERS.keys()


def new_layers(
    config: PreTrainedConfig,
    shard: Shard,
    growth: int,
    kv_dtype: torch.dtype | None,
    max_length: int | None,
    near_tokens: int | None = None,
) -> list[Any]:
    """The layers of a `TreeCache` with these arguments, or ValueError."""
    is_fixed = max_length is not None
    size: Any = growth
    if max_length is not None:
        shard.check_holds(max_length)
        size = Progress(max_length)
    layers: list[Any] = []
    for i, kind in enumerate(_layer_kinds(config)):
        own = config_of_layer(config, i)
        rank: Any = getattr(own, "kv_lora_rank", None)
        window: Any = getattr(own, "sliding_window", None)
        # A ring begins in the middle of a block.
        is_whole = window is None or (shard.blocks.size > 0 and is_fixed)
        arguments = shard, size, kv_dtype
        if kind in _STATE_LAYERS:
            number = getattr(own, "number_of_conv_states", 1)
            layers.append(_STATE_LAYERS[kind](number_of_states=number))
        elif kind == INDEXED and _has_own_index(own, i):
            indexed = (IndexedLatentLayer, StaticIndexedLatentLayer)[is_fixed]
            layers.append(indexed(*arguments, kv_lora_rank=rank, index=Index.of(own)))
        elif kind == BLOCKS:
            of_blocks = (BlockLayer, StaticBlockLayer)[is_fixed]
            layers.append(of_blocks(*arguments, index=Index.of(own)))
        elif rank is not None:
            latents = (LatentLayer, StaticLatentLayer)[is_fixed]
            layers.append(latents(*arguments, kv_lora_rank=rank))
        elif kind == "sliding_attention" and not is_whole:
            ring = (WindowLayer, StaticWindowLayer)[is_fixed]
            layers.append(ring(*arguments, window=window))
        elif near_tokens is not None:
            layers.append(FarLayer(*arguments, near_tokens=near_tokens))
        else:
            layers.append((TreeCacheLayer, StaticTreeCacheLayer)[is_fixed](*arguments))
    if any(keeps_state(layer) for layer in layers):
        for layer in layers:
            layer.is_beside_states = True
    if near_tokens is not None:
        _check_far(config.model_type, layers)
    if is_fixed or near_tokens is not None:
        _note_first_allocations(layers)
    if shard.blocks.size:
        _check_blocks(shard, layers)
    return layers


def config_of_layer(config: PreTrainedConfig, number: int) -> Any:
    """The configuration of one layer, where layers differ in more than their kind."""
    layers: Any = getattr(config, "per_layer_config", None)
    return config if layers is None else layers[number]


def _check_blocks(shard: Shard, layers: list[Any]) -> None:
    """Refuses layers whose attention depends on more than the blocks."""
    if any(map(has_index, layers)):
        raise shard.blocks.refusal("TreeCache", "is not supported with an index that chooses keys")
    # A matrix product that makes keys of latents may round otherwise for another number of rows.
    if any(isinstance(layer, LatentLayer) for layer in layers):
        raise shard.blocks.refusal("TreeCache", "is not supported with latent attention")
    for layer in layers:
        if isinstance(layer, WindowLayer):
            raise shard.blocks.refusal(
                "TreeCache",
                f"needs a max_length, as the model has layers with a sliding window of "
                f"{layer.window}, got max_length=None",
            )


def _check_far(name: str, layers: list[Any]) -> None:
    """Refuses layers whose older keys cannot move to the host, and models without older keys."""
    for layer in layers:
        if has_index(layer) or isinstance(layer, LatentLayer):
            what = "an index that chooses keys" if has_index(layer) else "latents"
            raise ValueError(
                f"TreeCache: far='cpu' is not supported with {what}, as {name!r} has; leave far out"
            )
    if not any(isinstance(layer, FarLayer) for layer in layers):
        raise ValueError(
            f"TreeCache: far='cpu' needs a layer that keeps the keys of all tokens; those of "
            f"{name!r} have a sliding window or a state, which stay on the device: leave far out"
        )


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
    if name in _OTHER_INDEXES:
        raise ValueError(
            f"TreeCache: {name!r} {_OTHER_INDEXES[name]}, which is not spread over ranks yet"
        )
    if config.is_encoder_decoder:
        raise ValueError(
            f"TreeCache: the model must be a decoder, got {name!r}, an encoder with a decoder"
        )
    if kinds is None:  # then all layers are of one kind, where a window is for all
        kinds = ["sliding_attention"] * config.num_hidden_layers
    unknown = {*kinds} - _LAYER_TYPES
    error = None
    if unknown:
        error = f"layers must be of the types {', '.join(sorted(_LAYER_TYPES))}; "
        error += f"{name!r} has {', '.join(sorted(unknown))}"
    elif getattr(config, "num_kv_shared_layers", None) or _shares_keys(config):
        error = f"every layer must have keys of its own; {name!r} shares keys between layers"
    elif getattr(config, "cross_attention_layers", None):
        error = f"layers that attend to images are not supported; {name!r} has such ones at "
        error += ", ".join(map(str, config.cross_attention_layers))
    elif name in _OF_THEIR_OWN:
        error = f"{name!r} takes only a cache of the class that transformers has for it"
    elif not _KEY_LAYERS & {*kinds}:
        error = "a layer must have keys to spread over ranks; those of "
        error += f"{name!r} are {', '.join(sorted({*kinds}))}"
    elif has_indexes(config):
        error = _obstacle_of_index(config, kinds)
    if error is not None:
        raise ValueError(f"TreeCache: {error}")
    return list(kinds)


def _shares_keys(config: PreTrainedConfig) -> bool:
    """True where layers attend to the keys of another one, by `kv_source_layers`."""
    modes: Any = getattr(config, "kv_sharing_modes", None) or ()
    return any(str(mode).startswith("reuse") for mode in modes)


def _obstacle_of_index(config: PreTrainedConfig, kinds: list[str]) -> str | None:
    """The reason why the keys that an index chooses cannot be spread over ranks, or None."""
    name = config.model_type
    first = next(i for i, kind in enumerate(kinds) if kind in (INDEXED, BLOCKS))
    own = config_of_layer(config, first)
    fields = ["index_head_dim", "index_n_heads"]
    if INDEXED in kinds:
        fields.append("index_topk")
    if BLOCKS in kinds:
        fields += ["index_topk_blocks", "index_block_size"]
    for field in fields:
        value = getattr(own, field, None)
        if not isinstance(value, int) or value < 1:
            return f"{field} of {name!r} must be at least 1, got {value!r}"
    if INDEXED in kinds and getattr(own, "kv_lora_rank", None) is None:
        return f"an index must choose among latents; {name!r} has no kv_lora_rank"
    if BLOCKS in kinds and own.index_n_heads != own.num_key_value_heads:
        return (
            f"the index of {name!r} must choose blocks for each of {own.num_key_value_heads} heads "
            f"of keys, got index_n_heads={own.index_n_heads}"
        )
    if not _has_own_index(own, first):
        return (
            f"the first layer of {name!r} with an index must choose keys itself, got indexer_types "
            f"{config.indexer_types[: first + 1]}"
        )
    return None


def _has_own_index(config: Any, number: int) -> bool:
    """True for a layer that chooses keys itself; others attend to the choice of one before."""
    kinds = getattr(config, "indexer_types", None)
    return kinds is None or kinds[number] == "full"


def state_kinds(config: PreTrainedConfig) -> list[str]:
    """The kinds of layers that keep a state of all tokens before, in a model."""
    return sorted({*(_kinds_that_run(config) or ())} & {*_STATES})


def goes_on_from_states(config: PreTrainedConfig) -> bool:
    """True where a pass of several tokens goes on from the states of the tokens before it, or no
    layer keeps one."""
    config = text_config(config)
    return not state_kinds(config) or (_DO_GO_ON and config.model_type in _GO_ON_FROM_A_STATE)


def _kinds_that_run(config: PreTrainedConfig) -> list[str] | None:
    """The kinds of the layers, where the configuration has them, that transformers runs: a model
    may be cut after it was loaded."""
    kinds = getattr(config, "layer_types", None)
    return None if kinds is None else list(kinds[: config.num_hidden_layers])


def keeps_state(layer: Any) -> bool:
    return hasattr(layer, "recurrent_states")


def has_indexes(config: PreTrainedConfig) -> bool:
    """True for a model with layers in which an index chooses the keys of each query."""
    return bool({INDEXED, BLOCKS} & {*(_kinds_that_run(config) or ())})


def has_index(layer: Any) -> bool:
    return isinstance(layer, TreeCacheLayer) and layer.index_columns > 0
