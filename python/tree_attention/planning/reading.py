# SPDX-License-Identifier: BSD-3-Clause
"""Models by name, or from a directory with config.json, as transformers makes them and `hf` takes
them: the model is built without memory for its weights, and enabled."""

from __future__ import annotations

import copy
import re
import reprlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from .._json import MAX_BYTES, open_regular, parse_json_object, read_json_object
from .models import NAMED, Attention, Model, Weights

# Fields of config.json for shapes by name; others are as transformers has them by default.
_QWEN3 = {
    **{"model_type": "qwen3_moe", "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936},
    **{"num_experts": 128, "num_experts_per_tok": 8},
}
_GPT_OSS = {"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}}
# Bytes of a weight of experts in MXFP4: 4 bits, and 8 for the scale of 32 weights.
_MXFP4 = 17 / 32
_KINDS = ("linear_attention", "full_attention")
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-30b-a3b": (
        "Qwen3 30B-A3B",
        {"num_hidden_layers": 48, "hidden_size": 2048, "num_attention_heads": 32}
        | {"moe_intermediate_size": 768, **_QWEN3},
    ),
    "qwen3-235b-a22b": (
        "Qwen3 235B-A22B",
        {"num_hidden_layers": 94, "hidden_size": 4096, "num_attention_heads": 64}
        | {"moe_intermediate_size": 1536, **_QWEN3},
    ),
    "gpt-oss-20b": ("gpt-oss 20B", {"num_hidden_layers": 24, "num_local_experts": 32, **_GPT_OSS}),
    "gpt-oss-120b": (
        "gpt-oss 120B",
        {"num_hidden_layers": 36, "num_local_experts": 128, **_GPT_OSS},
    ),
    "gemma-3-27b": (
        "Gemma 3 27B, text",
        {"model_type": "gemma3_text", "num_hidden_layers": 62, "hidden_size": 5376}
        | {"num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 128}
        | {"intermediate_size": 21504, "sliding_window": 1024, "vocab_size": 262208},
    ),
    "deepseek-v3": ("DeepSeek V3", {"model_type": "deepseek_v3", "vocab_size": 129280}),
    "qwen3-next-80b-a3b": ("Qwen3-Next 80B-A3B", {"model_type": "qwen3_next"}),
    "granite-4.0-h-small": (
        "Granite 4.0 H Small",
        {"model_type": "granitemoehybrid", "num_hidden_layers": 40, "hidden_size": 4096}
        | {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 100352}
        | {"num_local_experts": 72, "num_experts_per_tok": 10, "intermediate_size": 768}
        | {"shared_intermediate_size": 1536, "tie_word_embeddings": True}
        | {"mamba_n_heads": 128, "mamba_d_head": 64, "mamba_d_state": 128}
        | {"layer_types": [_KINDS[i % 10 == 5] for i in range(40)]},
    ),
}
NAMES = (*NAMED, *CONFIGS)

# Fields with the number of experts that a token is sent to.
_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k_experts")
_EXPERTS = ".experts"
_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_MAX_SIZE = 1 << 63  # of a file in bytes


def find_model(name: str) -> Model:
    """The named shape, or that of a directory with config.json.

    Raises:
        ValueError: there is neither, or the model is of a kind that `hf` does not take; the message
            says which.
    """
    if name in NAMED:
        return NAMED[name]
    path = Path(name)
    if name not in CONFIGS and not (path / "config.json").is_file():
        raise ValueError(
            f"{name} is no directory with config.json, and the named shapes are {', '.join(NAMES)}"
        )
    try:
        from transformers import AutoConfig
    except ImportError as error:
        raise ValueError(
            f"reading {'this shape' if name in CONFIGS else 'config.json'} needs transformers: pip "
            "install 'tree-attention[hf]'"
        ) from error
    if name in CONFIGS:
        title, fields = CONFIGS[name]
        model = from_config(title, AutoConfig.for_model(**copy.deepcopy(fields)))
        if "quantization_config" in fields:
            return replace(model, weights=replace(model.weights, expert_itemsize=_MXFP4))
        return model
    from ..hf.weights.checkpoint_files import check_config_file

    try:
        check_config_file(path / "config.json", "the configuration")
    except OSError as error:
        raise ValueError(f"the configuration {name}/config.json: {error.strerror}") from error
    try:
        config = AutoConfig.from_pretrained(name, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the classes of transformers' checks are of many kinds
        raise ValueError(f"{name}/config.json cannot be read: {_one_line(error)}") from error
    try:
        stored = dict(_stored_bytes(path))
    except (OSError, ValueError) as error:
        reason = _one_line(error)
        raise ValueError(f"{name}: its safetensors files cannot be read: {reason}") from error
    return from_config(path.resolve().name, config, stored)


def from_config(name: str, config: Any, stored: dict[str, int] | None = None) -> Model:
    """What the arithmetic needs of the model that a configuration of transformers describes.

    Args:
        stored: bytes of the tensors of its checkpoint, by their names; None: weights are bf16.

    Raises:
        ValueError: transformers or `hf` refuses the model, or a field that is needed is missing.
    """
    from .. import hf
    from ..hf.cache.growing import TreeCacheLayer
    from ..hf.cache.tree_cache import TreeCache
    from ..hf.prompts.forward import check_prefill, may_be_chunked

    if "chunked_attention" in (getattr(config, "layer_types", None) or ()):
        raise ValueError(
            f"{name} cannot be planned: layer_types has 'chunked_attention', whose layers take no "
            "text longer than a chunk"
        )
    not_dealt = ""
    try:
        layers = TreeCache(config).layers  # refuses what it cannot cache, as
        model = _without_memory(config)
        hf.disable(hf.enable(model))  # this does what else cannot work
        filled = _fill_cache(model)
    except ValueError as error:
        raise ValueError(f"{name} cannot be planned: {_one_line(error)}") from error
    except Exception as error:  # of torch and transformers, of many kinds
        raise ValueError(
            f"{name} cannot be planned: fields of its configuration contradict each other: "
            f"{_one_line(error)}"
        ) from error
    try:
        check_prefill(model, "split")
    except ValueError as error:
        not_dealt = _reason(error)
    kinds = Counter(
        _attention(config, layer, keys)
        for layer, keys in zip(layers, filled, strict=True)
        if isinstance(layer, TreeCacheLayer)
    )
    states = [layer for layer in filled if hasattr(layer, "recurrent_states")]
    weights, sums, not_split = _weights(name, config, model)
    return Model(
        name,
        config.hidden_size,
        config.vocab_size,
        tuple(replace(kind, layers=count) for kind, count in kinds.items()),
        _as_stored(model, weights, stored),
        layers=len(layers),
        sums=sums,
        state_layers=len(states),
        states_bytes=sum(map(_state_bytes, states)),
        may_be_chunked=may_be_chunked(config),
        not_split=not_split,
        not_dealt=not_dealt,
    )


def _without_memory(config: Any) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, trust_remote_code=False
        ).eval()


def _fill_cache(model: Any) -> list[Any]:
    """The layers of transformers' own cache, with what they keep of a token of one sequence."""
    import torch
    from transformers import DynamicCache

    model.set_experts_implementation("batched_mm")  # which needs no numbers to choose experts
    cache = DynamicCache(config=model.config)
    ids = torch.zeros((1, 1), dtype=torch.long, device="meta")
    with torch.no_grad():
        model(input_ids=ids, past_key_values=cache, use_cache=True)
    return cache.layers


def _state_bytes(layer: Any) -> int:
    states = (*layer.conv_states.values(), *layer.recurrent_states.values())
    return sum(state.nbytes for state in states if state is not None)


def _attention(config: Any, layer: Any, filled: Any) -> Attention:
    """What one layer caches: `layer` of a `TreeCache`, and that of transformers with a token."""
    from ..hf.cache.latent import LatentLayer
    from ..hf.cache.window import MARGIN

    heads, (_, kv_heads, _, key), value = (
        config.num_attention_heads,
        filled.keys.shape,
        filled.values.shape[3],
    )
    if isinstance(layer, LatentLayer):
        columns = config.qk_nope_head_dim + value
        return Attention(1, heads, 1, columns, config.v_head_dim, latent=(key, value))
    margin = 0 if layer.window is None else MARGIN
    return Attention(1, heads, kv_heads, key, value, layer.window, margin)


def _weights(name: str, config: Any, model: Any) -> tuple[Weights, int, str]:
    """The weights, how many sums a split model has, and why it cannot be split."""
    from torch import nn

    from ..hf.weights.mesh import Mesh
    from ..hf.weights.plan import KEY_VALUE, QUERY, CannotSplitError, plan

    cut, sums, not_split = frozenset[str](), 0, ""
    try:
        made = plan(model, Mesh(None, 1, op="plan"))
        cut, sums = frozenset(made.cuts), len(made.summed)
    except CannotSplitError as error:
        not_split = _reason(error)
    if getattr(config, "quantization_config", None) is not None:
        not_split = f"{type(model).__name__} cannot be split: it has a quantization_config"
    head, counts, num_experts = model.get_output_embeddings(), Counter[str](), 1
    for path, parameter in model.named_parameters():
        module = path.rpartition(".")[0]
        child = module.rpartition(".")[2]
        if parameter is head.weight:
            kind = "head"
        elif isinstance(model.get_submodule(module), nn.Embedding):
            kind = "embedding"
        elif _EXPERTS in path:
            kind, num_experts = "experts", parameter.shape[0]
        elif path in cut:
            kind = {QUERY: "q", **dict.fromkeys(KEY_VALUE, "kv")}.get(child, "split")
        else:
            kind = "whole" if parameter.dim() > 1 else "vectors"
        counts[kind] += parameter.numel()
    chosen = chosen_experts(name, config) if counts["experts"] else 1
    kinds = ("q", "kv", "split", "whole", "vectors", "head", "embedding", "experts")
    sizes = {kind: counts[kind] for kind in kinds}
    return Weights(**sizes, num_experts=num_experts, chosen=chosen), sums, not_split


def chosen_experts(name: str, config: Any) -> int:
    """How many experts of a layer a token is sent to."""
    for field in _CHOSEN:
        if hasattr(config, field):
            chosen: int = getattr(config, field)
            return chosen
    raise ValueError(
        f"{name} cannot be planned: it has experts, and of {', '.join(_CHOSEN)} its config.json "
        "has none"
    )


def _as_stored(model: Any, weights: Weights, stored: dict[str, int] | None) -> Weights:
    """The same weights in as many bytes as their checkpoint has for them."""
    if not stored:
        return weights
    # Layers that transformers does not load, such as those that predict several tokens.
    unused = model._keys_to_ignore_on_load_unexpected or ()
    used = {x: n for x, n in stored.items() if not any(re.search(p, x) for p in unused)}
    experts = sum(size for name, size in used.items() if _EXPERTS in name)
    if not experts or not weights.experts:  # some families store experts under other names
        each = sum(used.values()) / weights.total
        return replace(weights, itemsize=each, expert_itemsize=each)
    others = sum(used.values()) - experts
    return replace(
        weights,
        itemsize=others / (weights.total - weights.experts),
        expert_itemsize=experts / weights.experts,
    )


def _stored_bytes(path: Path) -> Iterator[tuple[str, int]]:
    """The tensors of a checkpoint and their sizes in bytes, from the headers of its files; where
    files are missing, one size of all of them from the index."""
    from ..hf.weights.checkpoint_files import files_of

    index, files = path / _INDEX, [path / _WEIGHTS]
    if index.is_file():
        files = [path / file for file in files_of(index, "the index")]
        if not all(file.is_file() for file in files):
            metadata = read_json_object(index, "the index").get("metadata")
            total = metadata.get("total_size") if isinstance(metadata, dict) else None
            yield "", _checked_size(_INDEX, total)
            return
    elif not files[0].is_file():
        return
    for file in files:
        with open_regular(file) as opened:
            length = int.from_bytes(opened.read(8), "little")
            most = min(MAX_BYTES, max(0, file.stat().st_size - 8))
            if length > most:
                raise ValueError(
                    f"{file.name} has a header of {length:,} bytes, of at most {most:,}"
                )
            content = opened.read(length)
        try:
            header = parse_json_object(content)
        except ValueError as error:
            raise ValueError(f"the header of {file.name}: {error}") from None
        header.pop("__metadata__", None)
        for name, tensor in header.items():
            offsets = tensor.get("data_offsets") if isinstance(tensor, dict) else None
            if not isinstance(offsets, list) or [*map(type, offsets)] != [int, int]:
                raise ValueError(
                    f"{file.name}: data_offsets must be two integers, got {reprlib.repr(offsets)}"
                )
            yield name, _checked_size(file.name, offsets[1] - offsets[0])


def _checked_size(file: str, num_bytes: Any) -> int:
    if type(num_bytes) is not int or not 0 <= num_bytes <= _MAX_SIZE:
        raise ValueError(f"{file}: {reprlib.repr(num_bytes)} is no size in bytes")
    return num_bytes


def _reason(error: ValueError) -> str:
    """The sentence between the function that raised it and what it advises."""
    return str(error).partition(": ")[2].partition(";")[0]


def _one_line(error: Exception) -> str:
    text = str(error).partition("Exception raised from")[0]  # what follows is a C++ stack
    return " ".join(text.split()) or type(error).__name__
