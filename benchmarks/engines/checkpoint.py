# SPDX-License-Identifier: BSD-3-Clause
"""The checkpoint of all engines: the shape of Llama 3.2 1B with few layers and random weights.

python -m benchmarks.engines.checkpoint DIRECTORY
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from .drivers.timing import VOCABULARY

LAYERS = 4
HEADS, HEADS_KV, HEAD_DIM, HIDDEN, INTERMEDIATE = 32, 8, 64, 2048, 8192
LONGEST = 131072 + 1024


def configuration() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS_KV,
        head_dim=HEAD_DIM,
        max_position_embeddings=LONGEST,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
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
    """What a step reads of the weights: all matrices, of which the embedding is the output too."""
    attention = 2 * HIDDEN * HEAD_DIM * (HEADS + HEADS_KV)
    return 2 * (LAYERS * (attention + 3 * HIDDEN * INTERMEDIATE) + VOCABULARY * HIDDEN)


def kv_bytes(context: int) -> int:
    return 2 * 2 * LAYERS * HEADS_KV * HEAD_DIM * context


if __name__ == "__main__":
    make(Path(sys.argv[1]))
