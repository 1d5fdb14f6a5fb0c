# SPDX-License-Identifier: BSD-3-Clause
"""Digests of what every rank must have in common before a generation begins."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import GenerationConfig

_SAMPLES_PER_PARAMETER = 8
_HEX_DIGITS = 16


def digest_inputs(inputs: Mapping[str, Any]) -> str:
    """The digest of the names, shapes, dtypes and bytes of all tensors in `inputs`."""
    sha = hashlib.sha256()
    for name, value in sorted(inputs.items()):
        if isinstance(value, Tensor):
            sha.update(f"{name} {value.dtype} {list(value.shape)}".encode())
            sha.update(to_bytes(value))
    return sha.hexdigest()[:_HEX_DIGITS]


def digest_settings(generation_config: GenerationConfig) -> str:
    """The digest of the settings of a generation; of an object among them only its type counts."""
    settings = {
        name: value
        for name, value in generation_config.to_dict().items()
        if not name.startswith("_")
    }
    text = json.dumps(settings, sort_keys=True, default=lambda value: type(value).__name__)
    return hashlib.sha256(text.encode()).hexdigest()[:_HEX_DIGITS]


def digest_random_state(device: torch.device) -> str:
    """The digest of the states of the random generators that sampling draws from."""
    sha = hashlib.sha256(to_bytes(torch.get_rng_state()))
    if device.type == "cuda":
        sha.update(to_bytes(torch.cuda.get_rng_state(device)))
    return sha.hexdigest()[:_HEX_DIGITS]


@torch.no_grad()
def digest_parameters(model: torch.nn.Module) -> str:
    """The digest of the names, shapes and a few evenly spaced elements of all parameters.

    It tells models apart that were initialised or loaded differently, but may miss a single changed
    weight. Parameters that are DTensors are left out, as ranks hold different shards of them.
    """
    sha = hashlib.sha256()
    samples = []
    for name, parameter in sorted(model.named_parameters()):
        if isinstance(parameter, DTensor) or parameter.is_meta:
            continue
        sha.update(f"{name} {parameter.dtype} {list(parameter.shape)}".encode())
        step = max(1, parameter.numel() // _SAMPLES_PER_PARAMETER)
        samples.append(parameter.flatten()[::step][:_SAMPLES_PER_PARAMETER].cpu().float())
    if samples:
        sha.update(to_bytes(torch.cat(samples)))
    return sha.hexdigest()[:_HEX_DIGITS]


def to_bytes(x: Tensor) -> bytes:
    """The elements of `x` as they lie in memory."""
    return x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
