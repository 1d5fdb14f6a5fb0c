# SPDX-License-Identifier: BSD-3-Clause
"""The index of a saved `TreeCache`: what it says, how it is written, and what is refused of it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from transformers.configuration_utils import PreTrainedConfig

from ..exchange.agreement import Note
from ..sharding import BlockCyclic, Contiguous, ContiguousThenCyclic, ShardLayout
from .kv_dtypes import KV_DTYPES

if TYPE_CHECKING:
    from .cache import TreeCache

INDEX = "index.json"
_FORMAT, _VERSION = "tree_attention.hf.TreeCache", 1
PREFIX = "cache-"
# The names of the files beside the index, finished or not.
_OWN_NAME = re.compile(
    rf"{PREFIX}(\d+-of-\d+-[0-9a-f]{{16}}\.safetensors|(\d+-of-\d+|index)\.\d+\.tmp)"
)
LAYOUTS = {kind.__name__: kind for kind in (BlockCyclic, Contiguous, ContiguousThenCyclic)}
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (*KV_DTYPES.values(), torch.float16, torch.bfloat16, torch.float32, torch.float64)
}
# What decides a model's keys and values, beside its weights.
_MODEL_FIELDS = (
    "model_type",
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "kv_lora_rank",
    "qk_rope_head_dim",
    "vocab_size",
    "rope_parameters",
    "layer_types",
    "sliding_window",
)


class File(NamedTuple):
    """A rank's file: what its note tells the others, and the index of it."""

    name: str
    sha256: str

    def note(self) -> Note:
        return {"file": self._asdict()}


# The dtype and the shape, without the axis of the slots, of each buffer of a layer.
Kinds = dict[str, tuple[torch.dtype, list[int]]]


class Index(NamedTuple):
    """What the index says."""

    model: dict[str, Any]
    length: int
    layout: ShardLayout
    layers: list[Kinds]
    first_slots: list[int]  # of the layers: a sliding window has forgotten those before
    files: list[File]


def describe_model(config: PreTrainedConfig) -> dict[str, Any]:
    """What a saved cache and the model that goes on with it must have in common."""
    fields = config.to_dict()
    known = {name: fields.get(name) for name in _MODEL_FIELDS}
    described: dict[str, Any] = json.loads(json.dumps(known, default=str))
    return described


def layers_of(cache: TreeCache) -> list[dict[str, Any]]:
    """`Kinds` of all layers, in terms of JSON."""

    def described(x: Tensor) -> dict[str, Any]:
        dtype = str(x.dtype).removeprefix("torch.")
        return {"dtype": dtype, "shape": [*x.shape[:2], *x.shape[3:]]}

    return [
        {name: described(x) for name, x in layer.buffers().items()} for layer in cache.kv_layers
    ]


def write_index(cache: TreeCache, path: Path, files: list[dict[str, Any]]) -> None:
    layout = cache.shard.layout
    index = {
        "format": _FORMAT,
        "version": _VERSION,
        "model": cache.model,
        "length": cache.common_length("save"),
        "layout": {"kind": type(layout).__name__, **dataclasses.asdict(layout)},  # type: ignore[call-overload]
        "layers": layers_of(cache),
        "first_slots": [layer.first for layer in cache.kv_layers],
        "files": files,
    }
    unfinished = path / f"{PREFIX}index.{os.getpid()}.tmp"
    try:
        unfinished.write_text(json.dumps(index, indent=1) + "\n")
        to_disk(unfinished)
        to_disk(path)  # the names of the files, before the index that relies on them
        unfinished.replace(path / INDEX)
    finally:
        unfinished.unlink(missing_ok=True)
    to_disk(path)
    kept = {file["name"] for file in files}
    for old in path.glob(f"{PREFIX}*"):
        if old.name not in kept and _OWN_NAME.fullmatch(old.name):
            with suppress(OSError):  # the save is whole, whether or not older files can be removed
                old.unlink()


def read_index(path: Path) -> tuple[Index, str]:
    """The index of a directory, and its digest."""
    file = path / INDEX
    try:
        content = file.read_bytes()
    except FileNotFoundError:
        raise FileNotFoundError(
            f"TreeCache.load: {path} has no {INDEX}: no cache was saved there, or it never ended"
        ) from None
    try:
        entries = json.loads(content)
        if not isinstance(entries, Mapping) or entries.get("format") != _FORMAT:
            raise ValueError(f"its format is not {_FORMAT!r}")
        if entries["version"] != _VERSION:
            raise ValueError(
                f"it is of version {entries['version']}, and this release reads {_VERSION}"
            )
        index = _parsed(entries)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"TreeCache.load: {file} cannot be used: {error}") from error
    return index, hashlib.sha256(content).hexdigest()[:16]


def _parsed(entries: Mapping[str, Any]) -> Index:
    arguments = dict(entries["layout"])
    layout = LAYOUTS[arguments.pop("kind")](**arguments)
    length = entries["length"]
    files = [File(str(file["name"]), str(file["sha256"])) for file in entries["files"]]
    layers = [_parsed_layer(layer) for layer in entries["layers"]]
    if not isinstance(length, int) or length < 0:
        raise ValueError(f"length must be an integer of at least 0, got {length!r}")
    if len(files) != layout.world_size:
        raise ValueError(f"it names {len(files)} files for {layout.world_size} ranks")
    for file in files:
        if not _OWN_NAME.fullmatch(file.name):  # of this directory, not of any other
            raise ValueError(f"{file.name!r} is no name of a file")
    model, first_slots = dict(entries["model"]), list(entries["first_slots"])
    return Index(model, length, layout, layers, first_slots, files)


def _parsed_layer(entries: Mapping[str, Any]) -> Kinds:
    kinds = {name: (_DTYPES[kind["dtype"]], [*kind["shape"]]) for name, kind in entries.items()}
    names = {"keys", "values"} | ({"k_scale", "v_scale"} if kv_dtype_of(kinds) else set())
    if set(kinds) != names:
        raise ValueError(f"a layer has {sorted(kinds)}, expected {sorted(names)}")
    dtype, (*batch_and_heads, _) = kinds["keys"]
    for name, kind in kinds.items():
        is_scale = name.endswith("_scale")
        width = [] if is_scale else kind[1][2:]
        least = int(name != "values")  # those of latents have no columns
        is_size = all(type(size) is int and size >= least for size in kind[1])
        if len(width) != 1 - is_scale or not is_size:
            raise ValueError(f"{name} of a layer cannot have the sizes {kind[1]}")
        expected = (torch.float32 if is_scale else dtype, [*batch_and_heads, *width])
        if kind != expected:
            raise ValueError(f"{name} of a layer is of {kind}, expected {expected}")
    return kinds


def check_model(path: Path, saved: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    for name, value in own.items():
        if saved.get(name) != value:
            raise ValueError(
                f"TreeCache.load: {path} is of another model: its {name} is {saved.get(name)!r}, "
                f"and that of config {value!r}"
            )


def kv_dtype_of(kinds: Kinds) -> torch.dtype | None:
    """The dtype of a layer's keys where it is one of 8 bits."""
    dtype = kinds["keys"][0]
    return dtype if dtype in KV_DTYPES.values() else None


def to_disk(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
