# SPDX-License-Identifier: BSD-3-Clause
"""Tiny models with random weights, and what HuggingFace generates with them."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    Gemma2Config,
    LlamaConfig,
    PretrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

VOCABULARY = 512
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "initializer_range": 0.3,  # large, so that tokens depend on what is attended to
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
GEMMA2 = {
    "sliding_window": 100,  # of every other layer
    "query_pre_attn_scalar": 32,
    "attn_logit_softcapping": 5.0,
    "final_logit_softcapping": 30.0,
}


def configurations() -> dict[str, PretrainedConfig]:
    return {
        "llama": LlamaConfig(**SHAPE),
        "llama_one_key_head": LlamaConfig(**SHAPE | {"num_key_value_heads": 1}),
        "qwen3": Qwen3Config(**SHAPE | {"head_dim": 64}),
        "qwen3_moe": Qwen3MoeConfig(
            **SHAPE, moe_intermediate_size=64, num_experts=8, num_experts_per_tok=2
        ),
        "gemma2": Gemma2Config(**SHAPE | GEMMA2),
        "gemma2_one_key_head": Gemma2Config(**SHAPE | GEMMA2 | {"num_key_value_heads": 1}),
        # ALiBi, and a key head for each query head.
        "bloom": BloomConfig(
            vocab_size=VOCABULARY,
            hidden_size=256,
            n_layer=3,
            n_head=8,
            initializer_range=0.3,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        ),
    }


def make(name: str, directory: Path, **changes: Any) -> Path:
    """Writes the model whose configuration has this name, and these changes."""
    torch.manual_seed(0)
    config = configurations()[name]
    config.update(changes)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(directory / name)
    return directory / name


def greedy(path: Path, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    """HuggingFace's new tokens, in float32."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    found = []
    for prompt in prompts:
        tokens = torch.tensor([prompt])
        whole = model.generate(tokens, max_new_tokens=num_tokens, do_sample=False)
        found.append(whole[0, len(prompt) :].tolist())
    return found


def logits(path: Path, prompt: list[int], new: list[int], dtype: torch.dtype) -> Tensor:
    """HuggingFace's `[new tokens, vocabulary]`: what it would choose each new token from."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    with torch.inference_mode():
        return model(torch.tensor([prompt + new])).logits[0, len(prompt) - 1 : -1].float()
