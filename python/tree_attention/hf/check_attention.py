# SPDX-License-Identifier: BSD-3-Clause
"""Checks of a model, before it is enabled, that this library can be its attention."""

import inspect
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from ..weights.mesh import Mesh
from ..weights.text import text_config, text_of
from .cache.build import has_index, state_kinds
from .cache.latent import EXPAND, LatentLayer, weight_of
from .cache.operands import check_taken, no_rows
from .cache.tree_cache import TreeCache
from .overrides import is_overridden
from .own_attention import FORWARDS
from .prompts.forward import rope_of_all_positions


def check_attention(
    model: PreTrainedModel, mesh: Mesh | None, cache: TreeCache, prefill: str
) -> bool:
    """Raises ValueError unless this library can be the attention of `model`, with such a cache and
    with this `prefill`. `mesh`: that splits its weights, or None.

    Returns:
        True where the tokens of its prompts can be split over ranks.
    """
    check_layers("enable", model, cache)
    text, name = text_of(model), type(model).__name__
    _check_causal(name, text)
    _check_latents(name, text, cache)
    _check_indexers(name, text, cache)
    _check_keys(name, text, cache.kv_dtype)
    _check_own_forwards(text)
    return check_split(model, mesh, prefill)


def check_layers(op: str, model: PreTrainedModel, cache: Any) -> None:
    """Raises ValueError unless each layer of `cache` belongs to one of the layers that run."""
    text, name = text_of(model), type(model).__name__
    found = {getattr(module, "layer_idx", None) for module in text.modules()} - {None}
    missing = [str(i) for i in range(len(cache.layers)) if i not in found]
    if found and missing:
        raise ValueError(
            f"{op}: the configuration of this {name} names {len(cache.layers)} layers, and no "
            f"layer has the layer_idx {', '.join(missing)}; set model.config.num_hidden_layers to "
            "the number of layers that run, and layer_idx of each attention to its place among them"
        )
    # Nor may they run in another order than in the cache, whose last layer ends a forward pass.
    for layers in text.modules():
        if isinstance(layers, torch.nn.ModuleList):
            numbers = [_layer_idx(layer) for layer in layers[: len(cache.layers)]]
            known = [number for number in numbers if number is not None]
            if known != sorted(known):
                raise ValueError(
                    f"{op}: the layers of this {name} run in the order of layer_idx "
                    f"{', '.join(map(str, known))}; set layer_idx of each attention to its place "
                    "among the layers that run"
                )
            if known:  # the lists inside these are of experts
                return


def _layer_idx(layer: torch.nn.Module) -> int | None:
    """The place in a cache that the modules of a layer have."""
    found = (getattr(module, "layer_idx", None) for module in layer.modules())
    return next((number for number in found if number is not None), None)


def _check_causal(name: str, text: PreTrainedModel) -> None:
    """Refuses an encoder, whose queries see the tokens after them as well."""
    for module in text.modules():
        if getattr(module, "is_causal", None) is False:
            raise ValueError(
                f"enable: {name} is an encoder: in its {type(module).__name__} a query sees the "
                "tokens after it too (is_causal is False), and a text that is generated has none; "
                "take a decoder, as GPT-2 or Llama is"
            )


def _check_indexers(name: str, text: PreTrainedModel, cache: TreeCache) -> None:
    """Raises ValueError unless each layer that chooses keys has the index that does."""
    found = {x.layer_idx for x in text.modules() if getattr(x, "indexer", None) is not None}
    missing = [i for i, x in enumerate(cache.layers) if has_index(x) and i not in found]
    if missing:
        raise ValueError(
            f"enable: layer {missing[0]} of this {name} has no indexer, and its configuration "
            "says that it chooses keys; set layer_types and indexer_types of model.config to "
            "those of the layers that run"
        )


def _check_latents(name: str, text: PreTrainedModel, cache: TreeCache) -> None:
    """Refuses a model with multi-head latent attention in a form that is not known, or with rows
    that the operator, as `kv_dtype`, does not take on the model's device."""
    layers = [layer for layer in cache.layers if isinstance(layer, LatentLayer)]
    if not layers:
        return
    modules: list[Any] = [x for x in text.modules() if hasattr(type(x), EXPAND)]
    if not modules:
        raise ValueError(
            f"enable: {name} has multi-head latent attention (kv_lora_rank "
            f"{layers[0].kv_lora_rank}), and no module of it has {EXPAND}, where latents come "
            f"from the cache; transformers >= 5.17 is needed, got {transformers.__version__}"
        )
    weight, *_ = [weight_of(module) for module in modules]
    dtype, device = weight.dtype, weight.device
    for module in {_sizes_of(x): x for x in modules}.values():  # layers may be of several sizes
        width = module.kv_lora_rank + module.qk_rope_head_dim
        rows, _, scales = no_rows((width, 0), dtype, cache.kv_dtype, device)
        what = f"enable: {name} caches latents of {width} columns, which"
        check_taken(what, dtype, rows, rows[..., : module.kv_lora_rank], scales)
        columns = module.qk_nope_head_dim + module.qk_rope_head_dim, module.v_head_dim
        made = f"keys of {columns[0]} columns and values of {columns[1]} from latents"
        what = f"enable: {name} makes {made}, which"
        check_taken(what, dtype, *no_rows(columns, dtype, None, device))


def _sizes_of(module: Any) -> tuple[int, ...]:
    names = "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"
    return tuple(getattr(module, name) for name in names)


def _check_keys(name: str, text: PreTrainedModel, kv_dtype: torch.dtype | None) -> None:
    """Raises ValueError unless the attention modules of a model can attend on its device to keys
    that are kept as `kv_dtype`, or as they are."""
    modules: list[Any] = [
        module
        for module in text.modules()
        if type(module).__name__ in FORWARDS
        or (hasattr(module, "is_causal") and isinstance(getattr(module, "head_dim", None), int))
    ]
    for columns in sorted({(m.head_dim, getattr(m, "v_head_dim", m.head_dim)) for m in modules}):
        what = f"enable: {name} has keys of head_dim {columns[0]}, which"
        check_taken(what, text.dtype, *no_rows(columns, text.dtype, kv_dtype, text.device))


def _check_own_forwards(text: PreTrainedModel) -> None:
    """Refuses attention that this library would replace, and somebody else has replaced."""
    for module in text.modules():
        is_replaced = "forward" in vars(module) and not is_overridden(module, "forward")
        if type(module).__name__ in FORWARDS and is_replaced:
            raise ValueError(
                f"enable: {type(module).__name__} computes its attention in forward, which was "
                "replaced on the model, by hooks or by hand; enable needs the one of transformers"
            )


def check_split(model: PreTrainedModel, mesh: Mesh | None = None, prefill: str = "split") -> bool:
    """True where the tokens of a model's prompts can be split over ranks; raises ValueError where
    they cannot and `prefill` asks for it."""
    obstacle = _split_obstacle(model, mesh)
    if obstacle is not None and prefill == "split":
        raise ValueError(
            f"enable: prefill='split' is not possible with {type(model).__name__}: {obstacle}; "
            "use prefill='auto' or 'replicated'"
        )
    return obstacle is None


def _split_obstacle(model: PreTrainedModel, mesh: Mesh | None) -> str | None:
    """The reason why the tokens of a model's prompts cannot be split over ranks, or None."""
    if mesh is not None:
        return "its weights are split, so that ranks need each other's tokens in every layer"
    if "forward" in vars(model) and not is_overridden(model, "forward"):
        return "its forward was replaced, by torch.compile or by hooks"
    config = text_config(model.config)
    if state_kinds(config):
        return f"its layers of {' and '.join(state_kinds(config))} need every token in order"
    parameters = inspect.signature(type(model).forward).parameters
    for name in ("position_ids", "logits_to_keep"):
        if name not in parameters:
            return f"its forward takes no {name}"
    if config is not model.config:
        return "it takes images or sound as well as text"
    kind = rope_of_all_positions(config)
    if kind is not None:
        return f"its rotary embedding, {kind!r}, depends on all positions of a chunk"
    return None
