# SPDX-License-Identifier: BSD-3-Clause
"""Tiny checkpoints of the families whose weights are split, with sizes that split unevenly."""

from __future__ import annotations

import copy
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from generations import PAD, greedy, left_padded

VOCAB_SIZE = 199
PROMPT_LENGTH, NUM_TOKENS = 37, 8
GREEDY = greedy(NUM_TOKENS)

_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 104,
    "num_hidden_layers": 2,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "pad_token_id": PAD,
    "bos_token_id": 2,
    "eos_token_id": None,
    # Large enough for scores that differ: with the usual 0.02 attention is a plain mean.
    "initializer_range": 0.3,
}
_UNTIED = {"tie_word_embeddings": False}
_WINDOWS = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", _UNTIED),
    "llama_tied": ("LlamaConfig", {"tie_word_embeddings": True, "mlp_bias": True}),
    "mistral": ("MistralConfig", {"sliding_window": 8, **_UNTIED}),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {"attention_bias": True, **_UNTIED}),
    "gemma2": (
        "Gemma2Config",
        {**_WINDOWS, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 5.0, **_UNTIED},
    ),
    "gemma3": ("Gemma3TextConfig", {**_WINDOWS, "query_pre_attn_scalar": 8, **_UNTIED}),
    "gpt_oss": ("GptOssConfig", {**_WINDOWS, "num_local_experts": 4, "num_experts_per_tok": 2}),
}


def make_model(name: str, dtype: torch.dtype = torch.float32, **sizes: Any) -> PreTrainedModel:
    """The same seeded weights in every process, biases and sinks included."""
    kind, options = FAMILIES[name]
    config = getattr(transformers, kind)(**copy.deepcopy(_SIZES | options | sizes))
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(7)
        # Eager is the attention of transformers that computes softcaps and sinks.
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager")
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith(("bias", "sinks")):
                parameter.normal_(0.0, 0.5)
    if name == "gpt_oss":
        model.set_experts_implementation("eager")
    return model.eval()


def make_prompts(padded: bool = True) -> dict[str, Tensor]:
    """Three prompts of one length, padded on the left or not."""
    return left_padded(VOCAB_SIZE, PROMPT_LENGTH, (0, 11, 5) if padded else (0, 0, 0), seed=4)


def sizes_of_tensor_groups(world_size: int) -> list[int]:
    """Every tensor_parallel_size that divides the world and the heads of keys and values."""
    both = (world_size, _SIZES["num_key_value_heads"])
    return [n for n in range(1, world_size + 1) if not any(x % n for x in both)]
