# SPDX-License-Identifier: BSD-3-Clause
"""The Llama of several programs: the shape of Llama 3.2 1B, random weights and a random context."""

from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig


def configuration(layers: int, **changes: Any) -> LlamaConfig:
    """The shape of Llama 3.2 1B with so many layers, and what else is to differ."""
    shape: dict[str, Any] = {
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": layers,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    }
    return LlamaConfig(**(shape | changes))


def make_model(layers: int, **changes: Any) -> Any:
    config = configuration(layers, **changes)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="sdpa"
        )
    return fill_with_repeated_numbers(model)


def fill_with_repeated_numbers(model: Any) -> Any:
    """Give a model on the meta device memory and weights."""
    model.to_empty(device="cpu")
    # init_weights for what is computed (rotary frequencies, norms); the matrices, whose random
    # numbers would take a minute, repeat one block of them, the same on every rank.
    generator = torch.Generator().manual_seed(0)
    block = torch.empty(1 << 22).normal_(std=0.02, generator=generator).bfloat16()
    for name, parameter in model.named_parameters():
        parameter._is_hf_initialized = True
        flat = parameter.data.view(-1)
        if "norm" in name:
            parameter.data.fill_(1.0)
            continue
        for begin in range(0, flat.numel(), block.numel()):
            part = flat[begin : begin + block.numel()]
            part.copy_(block[: part.numel()])
    model.init_weights()
    return model.eval()


def random_context(config: Any, context: int) -> tuple[Tensor, Tensor]:
    shape = (1, config.num_key_value_heads, context, config.head_dim)
    generator = torch.Generator().manual_seed(0)
    k, v = (torch.empty(shape).normal_(generator=generator).bfloat16() for _ in range(2))
    return k, v


def fill(cache: Any, config: Any, context: int) -> Any:
    """The random context in every layer of a cache."""
    k, v = random_context(config, context)
    for layer in range(config.num_hidden_layers):
        cache.update(k, v, layer)
    return cache
