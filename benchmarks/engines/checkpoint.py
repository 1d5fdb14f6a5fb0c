# SPDX-License-Identifier: BSD-3-Clause
"""The checkpoint of all engines: the shape of Llama 3.2 1B with random weights.

python -m benchmarks.engines.checkpoint DIRECTORY
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from ..harness import llama_model

LAYERS = 4
LONGEST = 131072 + 1024


def configuration(layers: int = LAYERS) -> LlamaConfig:
    return llama_model.configuration(
        layers,
        max_position_embeddings=LONGEST,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},  # which all engines have
        bos_token_id=None,
        eos_token_id=None,
    )


def make(directory: Path, layers: int = LAYERS) -> None:
    """Writes the checkpoint where it is not yet.

    Raises:
        ValueError: there is one of another number of layers.
    """
    if (directory / "model.safetensors").exists():
        found = json.loads((directory / "config.json").read_text())["num_hidden_layers"]
        if found != layers:
            raise ValueError(f"{directory} has a checkpoint of {found} layers, not of {layers}")
        return
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(configuration(layers), dtype=torch.bfloat16)
    model.save_pretrained(directory)


def kv_bytes(context: int, layers: int) -> int:
    config: Any = configuration(layers)
    return 2 * 2 * layers * config.num_key_value_heads * config.head_dim * context


if __name__ == "__main__":
    make(Path(sys.argv[1]))
