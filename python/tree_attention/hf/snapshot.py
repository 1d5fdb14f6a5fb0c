# SPDX-License-Identifier: BSD-3-Clause
"""A `TreeCache` in a directory: a safetensors file per rank, and an index that names them.

A save writes files of new names beside those of the last one, and then replaces the index, which
alone says what belongs together: whoever is interrupted leaves the last save whole.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers.configuration_utils import PreTrainedConfig

from ..exchange.agreement import Note, Signature
from ..exchange.link import sentence
from ..sharding import BlockCyclic, Contiguous, ContiguousThenCyclic, ShardLayout
from .kv_dtypes import KV_DTYPES
from .outcome import on_every_rank

if TYPE_CHECKING:
    from .cache import TreeCache
    from .layer import TreeCacheLayer

_INDEX = "index.json"
_FORMAT, _VERSION = "tree_attention.hf.TreeCache", 1
_PREFIX = "cache-"
# The names of the files beside the index, finished or not.
_OWN_NAME = re.compile(
    rf"{_PREFIX}(\d+-of-\d+-[0-9a-f]{{16}}\.safetensors|(\d+-of-\d+|index)\.\d+\.tmp)"
)
_LAYOUTS = {kind.__name__: kind for kind in (BlockCyclic, Contiguous, ContiguousThenCyclic)}
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


class _File(NamedTuple):
    """A rank's file: what its note tells the others, and the index of it."""

    name: str
    sha256: str

    def note(self) -> Note:
        return {"file": self._asdict()}


# The dtype and the shape, without the axis of the slots, of each buffer of a layer.
_Kinds = dict[str, tuple[torch.dtype, list[int]]]


class _Index(NamedTuple):
    """What the index says."""

    model: dict[str, Any]
    length: int
    layout: ShardLayout
    layers: list[_Kinds]
    first_slots: list[int]  # of the layers: a sliding window has forgotten those before
    files: list[_File]


def describe_model(config: PreTrainedConfig) -> dict[str, Any]:
    """What a saved cache and the model that goes on with it must have in common."""
    fields = config.to_dict()
    known = {name: fields.get(name) for name in _MODEL_FIELDS}
    described: dict[str, Any] = json.loads(json.dumps(known, default=str))
    return described


def save(cache: TreeCache, directory: str | os.PathLike[str]) -> None:
    """`TreeCache.save`."""
    shard, path = cache.shard, Path(directory)
    comm, rank, timeout = shard.comm, shard.rank, shard.timeout

    def write() -> tuple[Signature, _File]:
        length = cache.common_length("save")
        kind = type(shard.layout).__name__
        if type(shard.layout) is not _LAYOUTS.get(kind):
            raise ValueError(
                f"TreeCache.save: the layout must be one of {', '.join(_LAYOUTS)}, got {kind}; "
                "reshard the cache first"
            )
        if cache.state_layers:
            raise ValueError(
                "TreeCache.save: layers that keep a state are not saved; compute the cache again"
            )
        if not all(layer.is_initialized for layer in cache.kv_layers):
            raise ValueError("TreeCache.save: the cache holds no tokens yet; run the model first")
        path.mkdir(parents=True, exist_ok=True)
        return (
            ("length", length),
            ("layout", shard.layout),
            ("layers", _layers_of(cache)),
            ("first slots of the layers", [layer.first for layer in cache.kv_layers]),
        ), _write_tensors(cache, path)

    file, notes = on_every_rank("TreeCache.save", comm, timeout, write, _File.note)

    def write_index() -> tuple[Signature, None]:
        if rank == 0:
            files = [file._asdict()] if len(notes) == 1 else [note["file"] for note in notes]
            _write_index(cache, path, files)
        return (), None

    on_every_rank("TreeCache.save", comm, timeout, write_index)


def restore(cache: TreeCache, directory: str | os.PathLike[str]) -> None:
    """Fills a new cache with what `save` wrote, of any world size and layout."""
    shard = cache.shard

    def read() -> tuple[Signature, None]:
        path = Path(directory)
        index, digest = _read_index(path)
        _check_model(path, index.model, cache.model)
        _read_tensors(cache, path, index)
        return (
            ("digest of the index", digest),
            ("layout", shard.layout),
            ("kv_dtype", cache.kv_dtype),
        ), None

    on_every_rank("TreeCache.load", shard.comm, shard.timeout, read)


def _layers_of(cache: TreeCache) -> list[dict[str, Any]]:
    """`_Kinds` of all layers, in terms of JSON."""

    def described(x: Tensor) -> dict[str, Any]:
        dtype = str(x.dtype).removeprefix("torch.")
        return {"dtype": dtype, "shape": [*x.shape[:2], *x.shape[3:]]}

    return [
        {name: described(x) for name, x in layer.buffers().items()} for layer in cache.kv_layers
    ]


def _write_tensors(cache: TreeCache, path: Path) -> _File:
    shard = cache.shard
    tensors = {
        f"layers.{i}.{name}": x[:, :, layer.held()].contiguous().cpu()
        for i, layer in enumerate(cache.kv_layers)
        for name, x in layer.buffers().items()
    }
    place = f"{shard.rank:05}-of-{shard.world_size:05}"
    unfinished = path / f"{_PREFIX}{place}.{os.getpid()}.tmp"
    try:
        try:
            save_file(tensors, unfinished)
        except SafetensorError as error:  # also where the disk is full
            raise OSError(
                f"TreeCache.save: {unfinished} cannot be written: {sentence(error)}"
            ) from error
        _to_disk(unfinished)
        digest = _digest(unfinished)
        name = f"{_PREFIX}{place}-{digest[:16]}.safetensors"
        unfinished.replace(path / name)
    finally:
        unfinished.unlink(missing_ok=True)
    return _File(name, digest)


def _write_index(cache: TreeCache, path: Path, files: list[dict[str, Any]]) -> None:
    layout = cache.shard.layout
    index = {
        "format": _FORMAT,
        "version": _VERSION,
        "model": cache.model,
        "length": cache.common_length("save"),
        "layout": {"kind": type(layout).__name__, **dataclasses.asdict(layout)},  # type: ignore[call-overload]
        "layers": _layers_of(cache),
        "first_slots": [layer.first for layer in cache.kv_layers],
        "files": files,
    }
    unfinished = path / f"{_PREFIX}index.{os.getpid()}.tmp"
    try:
        unfinished.write_text(json.dumps(index, indent=1) + "\n")
        _to_disk(unfinished)
        _to_disk(path)  # the names of the files, before the index that relies on them
        unfinished.replace(path / _INDEX)
    finally:
        unfinished.unlink(missing_ok=True)
    _to_disk(path)
    kept = {file["name"] for file in files}
    for old in path.glob(f"{_PREFIX}*"):
        if old.name not in kept and _OWN_NAME.fullmatch(old.name):
            with suppress(OSError):  # the save is whole, whether or not older files can be removed
                old.unlink()


def _to_disk(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _digest(path: Path) -> str:
    sha, block = hashlib.sha256(), bytearray(1 << 20)
    with path.open("rb") as file:
        while size := file.readinto(block):
            sha.update(memoryview(block)[:size])
    return sha.hexdigest()


def _read_index(path: Path) -> tuple[_Index, str]:
    """The index of a directory, and its digest."""
    file = path / _INDEX
    try:
        content = file.read_bytes()
    except FileNotFoundError:
        raise FileNotFoundError(
            f"TreeCache.load: {path} has no {_INDEX}: no cache was saved there, or it never ended"
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


def _parsed(entries: Mapping[str, Any]) -> _Index:
    arguments = dict(entries["layout"])
    layout = _LAYOUTS[arguments.pop("kind")](**arguments)
    length = entries["length"]
    files = [_File(str(file["name"]), str(file["sha256"])) for file in entries["files"]]
    layers = [_parsed_layer(layer) for layer in entries["layers"]]
    if not isinstance(length, int) or length < 0:
        raise ValueError(f"length must be an integer of at least 0, got {length!r}")
    if len(files) != layout.world_size:
        raise ValueError(f"it names {len(files)} files for {layout.world_size} ranks")
    for file in files:
        if not _OWN_NAME.fullmatch(file.name):  # of this directory, not of any other
            raise ValueError(f"{file.name!r} is no name of a file")
    model, first_slots = dict(entries["model"]), list(entries["first_slots"])
    return _Index(model, length, layout, layers, first_slots, files)


def _parsed_layer(entries: Mapping[str, Any]) -> _Kinds:
    kinds = {name: (_DTYPES[kind["dtype"]], [*kind["shape"]]) for name, kind in entries.items()}
    names = {"keys", "values"} | ({"k_scale", "v_scale"} if _kv_dtype(kinds) else set())
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


def _check_model(path: Path, saved: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    for name, value in own.items():
        if saved.get(name) != value:
            raise ValueError(
                f"TreeCache.load: {path} is of another model: its {name} is {saved.get(name)!r}, "
                f"and that of config {value!r}"
            )


def _kv_dtype(kinds: _Kinds) -> torch.dtype | None:
    """The dtype of a layer's keys where it is one of 8 bits."""
    dtype = kinds["keys"][0]
    return dtype if dtype in KV_DTYPES.values() else None


def _read_tensors(cache: TreeCache, path: Path, index: _Index) -> None:
    shard, source = cache.shard, index.layout
    if len(index.layers) != len(cache.kv_layers):
        raise ValueError(
            f"TreeCache.load: {path} holds {len(index.layers)} layers, and the model has "
            f"{len(cache.kv_layers)}"
        )
    if cache.max_length is not None and any(index.first_slots):
        raise ValueError(
            f"TreeCache.load: {path} holds the last slots of layers with a sliding window, which "
            "keep all slots in a cache with max_length; load it without"
        )
    # What the next token sees must be there: all slots, or those of its window.
    most = [max(0, index.length - (layer.window or index.length)) for layer in cache.kv_layers]
    if len(index.first_slots) != len(most) or not all(
        type(first) is int and 0 <= first <= limit
        for first, limit in zip(index.first_slots, most, strict=True)
    ):
        raise ValueError(
            f"TreeCache.load: {path / _INDEX} is damaged: first_slots of the layers must be slots "
            f"up to {most}, got {index.first_slots}"
        )
    _check_sizes(path, index)
    shard.check_holds(index.length)
    if cache.max_length is not None and index.length > cache.max_length:
        raise ValueError(
            f"TreeCache.load: {path} holds {index.length} tokens, more than max_length = "
            f"{cache.max_length}"
        )
    slots, owners = {}, {}
    for first in {*index.first_slots}:
        slots[first] = shard.layout.local_slots(shard.rank, first, index.length)
        owners[first] = source.owner(slots[first])
    with torch.inference_mode(False), torch.no_grad():
        layers = [*zip(cache.kv_layers, index.layers, index.first_slots, strict=True)]
        for layer, kinds, first in layers:
            _allocate(layer, first, index.length, kinds)
        for rank, file in enumerate(index.files):
            rows = {first: (owner == rank).nonzero()[:, 0] for first, owner in owners.items()}
            if not any(len(found) for found in rows.values()):
                continue
            place = path / file.name
            with _opened(place, file.sha256) as handle:
                for i, (layer, kinds, first) in enumerate(layers):
                    if len(rows[first]) == 0:
                        continue
                    begin = source.count(rank, first)
                    count = source.count(rank, index.length) - begin
                    found = {
                        name: _tensor(place, handle, f"layers.{i}.{name}", kind, count)
                        for name, kind in kinds.items()
                    }
                    local = source.count(rank, slots[first][rows[first]]) - begin
                    part = {name: x.index_select(2, local) for name, x in found.items()}
                    _put(layer, rows[first], part, _kv_dtype(kinds))
    for layer in cache.kv_layers:
        layer.length = index.length


def _check_sizes(path: Path, index: _Index) -> None:
    """Before anything is allocated by what the index says."""
    slot_bytes = [
        sum(math.prod(shape) * dtype.itemsize for dtype, shape in kinds.values())
        for kinds in index.layers
    ]
    for rank, file in enumerate(index.files):
        place = path / file.name
        end = index.layout.count(rank, index.length)
        least = sum(
            (end - index.layout.count(rank, first)) * num_bytes
            for first, num_bytes in zip(index.first_slots, slot_bytes, strict=True)
        )
        try:
            size = place.stat().st_size
        except FileNotFoundError:
            raise FileNotFoundError(
                f"TreeCache.load: {place} is missing, which the index names; copy the whole "
                "directory"
            ) from None
        if size < least:
            raise ValueError(
                f"TreeCache.load: {place} is damaged: it has {size} bytes, and by the index at "
                f"least {least}; copy or save it again"
            )


def _allocate(layer: TreeCacheLayer, first: int, length: int, kinds: _Kinds) -> None:
    saved = _kv_dtype(kinds)
    if layer.kv_dtype is None:
        layer.kv_dtype = saved

    def empty(name: str) -> Tensor:
        dtype, (batch, num_heads_kv, head_dim) = kinds[name]
        dtype = dtype if saved is None else torch.float32
        return torch.empty((batch, num_heads_kv, 0, head_dim), dtype=dtype, device="cpu")

    layer.first = layer.length = first
    layer.dropped = layer.shard.count(first)
    layer.lazy_initialization(empty("keys"), empty("values"))
    layer.grow(layer.shard.count(length))


def _put(
    layer: TreeCacheLayer, rows: Tensor, part: Mapping[str, Tensor], saved: torch.dtype | None
) -> None:
    """Writes what was saved of some slots into these rows of a layer."""
    if layer.kv_dtype == saved:
        for name, target in layer.buffers().items():
            target[:, :, rows] = part[name]
        return
    keys, values = part["keys"], part["values"]
    if saved is not None:
        keys = keys.float() * part["k_scale"][..., None]
        values = values.float() * part["v_scale"][..., None]
    layer.quantise(keys, values, rows)


def _opened(path: Path, digest: str) -> Any:
    """A file that is as it was saved, mapped into memory."""
    found = _digest(path)
    if found != digest:
        raise ValueError(
            f"TreeCache.load: {path} is damaged: its SHA-256 is {found[:16]}..., and by the index "
            f"{digest[:16]}...; copy or save it again"
        )
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise ValueError(f"TreeCache.load: {path} is damaged: {sentence(error)}") from error


def _tensor(
    path: Path, handle: Any, name: str, kind: tuple[torch.dtype, list[int]], count: int
) -> Tensor:
    """A tensor of a file, of `count` slots."""
    try:
        found: Tensor = handle.get_tensor(name)
    except SafetensorError as error:
        raise ValueError(f"TreeCache.load: {path} lacks {name}: {sentence(error)}") from error
    dtype, (batch, num_heads_kv, *width) = kind
    shape = [batch, num_heads_kv, count, *width]
    if (found.dtype, list(found.shape)) != (dtype, shape):
        raise ValueError(
            f"TreeCache.load: {path}: {name} is of {found.dtype} and shape {list(found.shape)}, "
            f"and by the index of {dtype} and {shape}"
        )
    return found
