# SPDX-License-Identifier: BSD-3-Clause
"""The files of a checkpoint, of which the JSON is checked before anything is built by it."""

import os
import reprlib
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from transformers.utils import cached_file

from ...._json import read_json_object
from ....exchange import sentence

# Fields that no model can have at 0 or below.
_POSITIVE = {
    *("num_hidden_layers", "n_layer", "n_layers", "num_attention_heads", "n_head", "n_heads"),
    *("num_key_value_heads", "head_dim", "hidden_size", "n_embd", "d_model"),
    *("intermediate_size", "vocab_size"),
}
# The most that a field may say, by a part of its name. The deepest models that are published have
# 126 layers. In these bounds the weights of a layer have less than the 2^63 bytes of any tensor.
_MOST = {"layer": 1000, "head": 10_000, "expert": 10_000, **dict.fromkeys(_POSITIVE, 1 << 24)}
_MOST_OF_OTHERS = (1 << 63) - 1


def check_config_file(file: str | os.PathLike[str], what: str) -> None:
    """Raises ValueError, beginning with `what`, if a size in a config.json is that of no model."""
    config = read_json_object(file, what)
    quantization = config.get("quantization_config")
    if not isinstance(quantization, dict | None):
        raise ValueError(
            f"{what} {os.fspath(file)}: quantization_config must be an object, got "
            f"{reprlib.repr(quantization)}"
        )
    remaining: list[tuple[str, Any]] = [("", config)]
    while remaining:
        name, value = remaining.pop()
        if isinstance(value, dict):
            remaining += value.items()
        elif isinstance(value, list):
            remaining += ((name, each) for each in value)
        elif value is not None and (name in _POSITIVE or type(value) is int):
            most = next((n for part, n in _MOST.items() if part in name), _MOST_OF_OTHERS)
            least = 1 if name in _POSITIVE else -most
            if type(value) is not int or not least <= value <= most:
                raise ValueError(
                    f"{what} {os.fspath(file)}: {name} must be an integer of {least:,} to "
                    f"{most:,}, got {reprlib.repr(value)}"
                )


def files_of(index: str | os.PathLike[str], what: str) -> list[str]:
    """The names of the safetensors files in the index of a checkpoint; errors begin with `what`."""
    names = read_json_object(index, what).get("weight_map")
    found: list[Any] = [*names.values()] if isinstance(names, dict) else [None]
    if not all(isinstance(name, str) and name == Path(name).name for name in found):
        raise ValueError(
            f"{what} {os.fspath(index)}: weight_map must name the file of each weight, in this "
            f"directory, got {reprlib.repr(names)}; copy or download it again"
        )
    return sorted({*found})


def find_file(path: str | Path, name: str, required: bool = False) -> Path | None:
    """A file of a checkpoint, from the Hub if need be; None if it has no such file.

    Of a required one that no directory here can have, the OSError tells what the Hub said: it may
    not have been reached.
    """
    required = required and not os.path.isdir(path)
    try:
        file = cached_file(path, name, _raise_exceptions_for_missing_entries=required)
    except OSError as error:
        reason = f"from_pretrained: {path} is no directory, and no name on the Hugging Face Hub"
        raise OSError(f"{reason} that can be read: {sentence(error)}") from None
    return None if file is None else Path(file)


def opened(path: str | Path, name: str) -> Any:
    """A safetensors file of a checkpoint, mapped into memory."""
    file = find_file(path, name, required=True)
    if file is None:
        raise OSError(f"from_pretrained: {path} lacks the file {name}, which its index names")
    try:
        return safe_open(file, framework="pt")
    except SafetensorError as error:
        raise ValueError(
            f"from_pretrained: {file} is damaged: {sentence(error)}; copy or download it again"
        ) from None
