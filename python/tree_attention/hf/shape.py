# SPDX-License-Identifier: BSD-3-Clause
"""Shapes of models for the planner, from configurations, as transformers makes them.

A model is built without memory for its weights; nothing is known by its family.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache

from ..planning.models import BF16, Attention, Index, Model, Weights
from ..weights.checkpoint.formats import check_format
from ..weights.heads import LATENT
from ..weights.mesh import OneRank
from ..weights.plan import plan, whole_parts
from ..weights.text import model_of_text, share_of_text, text_config
from .cache.build import BLOCKS, INDEXED, config_of_layer
from .cache.growing import TreeCacheLayer
from .cache.latent import LatentLayer
from .cache.tree_cache import TreeCache
from .check_attention import check_split
from .release import CACHE_NAME

# The share of all weights from which it is said which are not cut.
_MUCH = 0.03
# Fields with the number of experts that a token is sent to.
_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k_experts")


def shape_of(
    name: str, config: Any, stored: int = 0, check: Callable[[Any], object] = lambda model: None
) -> Model:
    """Return the shape of a configuration's model, which `check` may refuse; without `stored`
    bytes, weights are bf16.

    Raises:
        ValueError: the model cannot be built or cached, or `check` raised.
    """
    whole, config = config, text_config(config)
    if "chunked_attention" in (getattr(config, "layer_types", None) or ()):
        raise ValueError("'chunked_attention' ends texts at a chunk")
    try:
        layers = TreeCache(config).layers  # refuses what it cannot cache, and
        built, filled = _build(whole, check)  # `check` what else cannot work
        if stored:  # some of it may be for images
            stored = round(stored * share_of_text(whole, built))
        weights, sums, not_split, not_cut = _weights(config, built, stored)
    except Exception as error:  # of torch and transformers, of many kinds
        raise ValueError(one_line(error)) from error
    prompts_not_split = ""
    try:
        check_split(built)
    except ValueError as error:
        prompts_not_split = _reason(error)
    kinds = Counter(
        _attention(config, i, layer, keys)
        for i, (layer, keys) in enumerate(zip(layers, filled, strict=True))
        if isinstance(layer, TreeCacheLayer)
    )
    attention = tuple(replace(kind, layers=count) for kind, count in kinds.items())
    sizes = config.hidden_size, config.vocab_size, attention, weights, len(layers), sums
    states = sum(
        state.nbytes
        for layer in filled
        for name in ("conv_states", "recurrent_states")
        for state in getattr(layer, name, {}).values()
        if state is not None
    )
    return Model(
        name,
        *sizes,
        states_bytes=states,
        not_split=not_split,
        prompts_not_split=prompts_not_split,
        not_cut=not_cut,
    )


def _build(config: Any, check: Callable[[Any], object]) -> tuple[Any, list[Any]]:
    """Return the model without memory, and transformers' cache after a token of one sequence."""
    options = {"dtype": torch.bfloat16, "trust_remote_code": False}
    with torch.device("meta"), torch.no_grad():
        model = model_of_text(config, **options).eval()
        check(model)
        model.set_experts_implementation("batched_mm")  # which needs no numbers to choose experts
        cache = DynamicCache(config=model.config)
        model(input_ids=torch.zeros((1, 1), dtype=torch.long), **{CACHE_NAME: cache})
    return model, cache.layers


def _attention(whole: Any, number: int, layer: Any, filled: Any) -> Attention:
    """Return the shape of one layer: of a `TreeCache`, and of transformers with a token."""
    config = config_of_layer(whole, number)
    index = _index(config, number, layer)
    heads, value = config.num_attention_heads, filled.values.shape[3]
    _, kv_heads, _, key = filled.keys.shape
    if isinstance(layer, LatentLayer):
        columns = config.qk_nope_head_dim + value
        latent = key, value
        return Attention(1, heads, 1, columns, config.v_head_dim, latent=latent, index=index)
    return Attention(1, heads, kv_heads, key, value, layer.window, index=index)


def _index(config: Any, number: int, layer: Any) -> Index | None:
    kind = (getattr(config, "layer_types", None) or {number: None})[number]
    if kind == BLOCKS:
        blocks, heads = config.index_topk_blocks, config.index_n_heads
        topk = blocks * config.index_block_size
        return Index(topk, heads, layer.index_columns, heads * blocks)
    if kind != INDEXED:
        return None
    topk = config.index_topk
    if not layer.index_columns:
        return Index(topk)
    return Index(topk, config.index_n_heads, layer.index_columns, topk)


def _weights(config: Any, model: Any, stored: int) -> tuple[Weights, int, str, str]:
    """Return the weights, the sums of a split model, why it is not split, and what is not cut."""
    cut, sums, not_split = frozenset[str](), 0, ""
    by_heads: dict[str, str] = {}  # kinds of the parameters that tensor_parallel_size divides
    of_queries: set[str] = set()
    quantization = config.to_dict().get("quantization_config") or {}
    try:
        made = plan(model, OneRank("plan"))
        cut, sums = frozenset(made.cuts), len(made.summed)
        for path, heads in made.heads.items():
            for child in heads.projections:
                kind = "kv" if child in ("k_proj", "v_proj") else "q"
                by_heads |= {f"{path}.{child}.{x}": kind for x in ("weight", "bias")}
                if kind == "q" and child != LATENT:
                    of_queries.add(f"{path}.{child}.weight")
        check_format(type(model).__name__, quantization)
    except ValueError as error:
        not_split = _reason(error)
    is_read_as_numbers = quantization and not not_split
    counts = Counter[str]()
    head, num_experts, chosen = model.get_output_embeddings(), 1, 1
    for path, parameter in model.named_parameters():
        module = path.rpartition(".")[0]
        if parameter is head.weight:
            kind = "head"
        elif isinstance(model.get_submodule(module), nn.Embedding):
            kind = "embedding" if path in cut or not_split else "tables"
        elif ".experts" in path:
            kind, num_experts = "experts", parameter.shape[0]
            fields = [field for field in _CHOSEN if hasattr(config, field)]
            if not fields:
                named = ", ".join(_CHOSEN)
                raise ValueError(f"it has experts, and of {named} its config.json has none")
            chosen = int(getattr(config, fields[0]))
        elif path in cut:
            kind = by_heads.get(path, "split")
        else:
            kind = "whole" if parameter.dim() > 1 else "vectors"
        counts[kind] += parameter.numel()
        counts["queries"] += parameter.numel() * (path in of_queries)
    weights = Weights(**counts, num_experts=num_experts, chosen=chosen)
    if stored and not is_read_as_numbers:
        others = BF16 * (weights.total - weights.experts)
        size = of_expert = stored / weights.total
        if weights.experts and quantization and stored > others:  # experts alone are quantized
            size, of_expert = BF16, (stored - others) / weights.experts
        weights = replace(weights, itemsize=size, matrix_itemsize=size, expert_itemsize=of_expert)
    whole, names = whole_parts(model.named_parameters(), cut)
    is_much = not not_split and whole > _MUCH * BF16 * weights.total
    return weights, sums, not_split, names if is_much else ""


def _reason(error: ValueError) -> str:
    """Return the middle of an error's text, without the function's name and the advice."""
    return str(error).partition(": ")[2].partition(";")[0]


def one_line(error: Exception) -> str:
    text = str(error).partition("Exception raised from")[0]  # what follows is a C++ stack
    return " ".join(text.split()) or type(error).__name__
