# SPDX-License-Identifier: BSD-3-Clause
"""Checkpoints with the published shapes of models, few layers and random weights.

python -m benchmarks.harness.published_shapes NAME DIRECTORY
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

from . import llama_model


@dataclass(frozen=True)
class Shape:
    """A published config.json, and how many of its layers are made."""

    title: str
    config: str
    layers: int
    published_layers: int
    fields: Mapping[str, Any]


# From the config.json of each model's page.
DEEPSEEK_V2_LITE_ATTENTION: Mapping[str, Any] = {
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
SHAPES = {
    "llama-3.2-1b": Shape(
        *("Llama 3.2 1B", "LlamaConfig", 16, 16),
        llama_model.configuration(1).to_dict(),
    ),
    "qwen3-30b-a3b": Shape(
        *("Qwen3 30B A3B", "Qwen3MoeConfig", 4, 48),
        {
            "vocab_size": 151936,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "max_position_embeddings": 40960,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
    ),
    "gpt-oss-20b": Shape(
        *("GPT-OSS 20B", "GptOssConfig", 2, 24),
        {
            "vocab_size": 201088,
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "num_local_experts": 32,
            "num_experts_per_tok": 4,
            "sliding_window": 128,
            "max_position_embeddings": 131072,
        },
    ),
    "deepseek-v2-lite": Shape(
        *("DeepSeek V2 Lite", "DeepseekV2Config", 4, 27),
        {
            "vocab_size": 102400,
            "hidden_size": 2048,
            "intermediate_size": 10944,
            "moe_intermediate_size": 1408,
            **DEEPSEEK_V2_LITE_ATTENTION,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "num_experts_per_tok": 6,
            "first_k_dense_replace": 1,
            "topk_method": "greedy",
            "max_position_embeddings": 163840,
        },
    ),
}


def make(name: str, directory: Path) -> Path:
    """Write the checkpoint of a shape below `directory` unless it is there; return its path."""
    path = directory / name
    if (path / "config.json").exists():
        return path
    shape = SHAPES[name]
    fields = {**shape.fields, "num_hidden_layers": shape.layers}
    fields.pop("layer_types", None)
    config = getattr(transformers, shape.config)(**fields)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    llama_model.fill_with_repeated_numbers(model)
    model.save_pretrained(path)
    return path


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=SHAPES)
    parser.add_argument("directory", type=Path)
    parsed = parser.parse_args()
    print(make(parsed.name, parsed.directory))
    sys.exit(0)
