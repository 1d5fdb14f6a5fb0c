# SPDX-License-Identifier: BSD-3-Clause
"""The checkpoint of all engines: the shape of Llama 3.2 1B with few layers and random weights.

python -m benchmarks.engines.checkpoint DIRECTORY
"""

import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from .. import llama

LAYERS = 4
LONGEST = 131072 + 1024


def configuration() -> LlamaConfig:
    return llama.configuration(
        LAYERS,
        max_position_embeddings=LONGEST,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},  # which all engines have
        bos_token_id=None,
        eos_token_id=None,
    )


def make(directory: Path) -> None:
    """Writes the checkpoint where it is not yet."""
    if (directory / "model.safetensors").exists():
        return
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(configuration(), dtype=torch.bfloat16)
    model.save_pretrained(directory)


def weights_bytes() -> int:
    """Return bytes of weights that a step reads: all matrices, the embedding as output."""
    config: Any = configuration()
    heads = config.num_attention_heads + config.num_key_value_heads
    layer = 2 * config.head_dim * heads + 3 * config.intermediate_size
    return 2 * config.hidden_size * (LAYERS * layer + config.vocab_size)


def kv_bytes(context: int) -> int:
    config: Any = configuration()
    return 2 * 2 * LAYERS * config.num_key_value_heads * config.head_dim * context


if __name__ == "__main__":
    make(Path(sys.argv[1]))
