# SPDX-License-Identifier: BSD-3-Clause
"""The checkpoint with linear layers in int8, as compressed-tensors. Runs in vLLM's environment."""

import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

INT8 = {"num_bits": 8, "type": "int", "symmetric": True}
SCHEME = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {**INT8, "strategy": "channel", "dynamic": False},
            "input_activations": {**INT8, "strategy": "token", "dynamic": True},
        }
    },
}


def write_w8a8(directory: Path, checkpoint: Path) -> None:
    """Writes weights with a scale for each output; activations get one for each token."""
    directory.mkdir()
    config = json.loads((checkpoint / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": SCHEME}))
    tensors: dict[str, Any] = {}
    for name, tensor in load_file(checkpoint / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            tensors[name] = tensor
            continue
        scale = tensor.float().abs().amax(dim=1, keepdim=True) / 127
        tensors[name] = (tensor / scale).round().char()
        tensors[f"{name}_scale"] = scale
    save_file(tensors, directory / "model.safetensors")
