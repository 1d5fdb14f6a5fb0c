# SPDX-License-Identifier: BSD-3-Clause
"""The index of a saved `TreeCache`: what it says, how it is written, and what is refused of it."""

import dataclasses
import hashlib
import json
import math
import os
import re
import reprlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor
from transformers.configuration_utils import PreTrainedConfig

from ...._json import open_regular, read_json_object
from ....exchange import Note, Signature
from ....sharding import BlockCyclic, Contiguous, ContiguousThenCyclic, ShardLayout
from ...options import KV_DTYPES
from ..growing import TreeCacheLayer
from ..shard import Shard

T = TypeVar("T")

INDEX = "index.json"
_FORMAT, _VERSION = "tree_attention.hf.TreeCache", 5
_READ = 4, 5  # 4 had no keys of an index
PREFIX = "cache-"
# The names of the other files in the directory, finished or not.
_OWN_NAME = re.compile(
    rf"{PREFIX}(\d+-of-\d+-[0-9a-f]{{16}}\.safetensors|(\d+-of-\d+|index)\.\d+\.tmp)"
)
LAYOUTS = {kind.__name__: kind for kind in (BlockCyclic, Contiguous, ContiguousThenCyclic)}
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (*KV_DTYPES.values(), torch.float16, torch.bfloat16, torch.float32, torch.float64)
}
# The states of a layer that keeps some, by the number of each.
_STATES = ("conv_states", "recurrent_states")
_STATE = re.compile(rf"({'|'.join(_STATES)})\.(\d{{1,4}})")
# The fields of a configuration that decide a model's keys and values.
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
    "index_head_dim",
    "index_n_heads",
    "indexer_types",
    "vocab_size",
    "rope_parameters",
    "layer_types",
    "sliding_window",
)


_BOUND = 1 << 63  # of integers in tensors


class Saved(Protocol):
    """The parts of a cache that are read to save it, and to load one: a `TreeCache` has them."""

    shard: Shard
    model: dict[str, Any]  # by `describe_model`

    @property
    def kv_layers(self) -> Sequence[TreeCacheLayer]: ...
    @property
    def state_layers(self) -> Sequence[Any]: ...
    @property
    def kv_dtype(self) -> torch.dtype | None: ...
    def common_length(self, op: str) -> int: ...
    def signature(self, op: str) -> Signature: ...


class File(NamedTuple):
    """A rank's file: what its note tells the others, and its index."""

    name: str
    sha256: str
    size: int  # in bytes

    def note(self) -> Note:
        return {"file": self._asdict()}


# The dtype and the shape, without the axis of the slots, of each buffer of a layer.
Kinds = dict[str, tuple[torch.dtype, list[int]]]


class Index(NamedTuple):
    """The contents of an index file."""

    sha256: str  # of all the rest
    length: int
    layout: ShardLayout
    layers: list[Kinds]
    first_slots: list[int]  # of the layers: a sliding window has forgotten those before
    states: list[Kinds]  # of the layers that keep states, whole: these have no slots
    files: list[File]


def describe_model(config: PreTrainedConfig) -> dict[str, Any]:
    """Facts that a saved cache and the model that goes on with it must have in common."""
    fields = config.to_dict()
    known = {name: fields.get(name) for name in _MODEL_FIELDS}
    described: dict[str, Any] = json.loads(json.dumps(known, default=str))
    return described


def layers_of(cache: Saved) -> list[dict[str, Any] | None]:
    """The keys and values of all layers but for their slots, in terms of JSON; None before any."""
    return [_described(layer) if layer.is_initialized else None for layer in cache.kv_layers]


def _described(layer: TreeCacheLayer) -> dict[str, Any]:
    keys, values = layer.key_rows, layer.value_rows
    described: dict[str, Any] = {
        "dtype": str(keys.dtype).removeprefix("torch."),
        "shape": [*keys.shape[:2], keys.shape[3], values.shape[3]],
    }
    if layer.index_columns:
        dtype = str(layer.index_keys.dtype).removeprefix("torch.")
        described["index"] = {"dtype": dtype, "columns": layer.index_columns}
    return described


def states_of(layer: Any) -> dict[str, Tensor]:
    """The tensors of a layer that keeps states, by attribute and number."""
    return {
        f"{name}.{number}": state
        for name in _STATES
        for number, state in getattr(layer, name).items()
        if state is not None
    }


def kinds_of_states(cache: Saved) -> list[dict[str, Any]]:
    """The states of all layers that keep some, in terms of JSON."""
    return [
        {
            name: [str(x.dtype).removeprefix("torch."), list(x.shape)]
            for name, x in states_of(layer).items()
        }
        for layer in cache.state_layers
    ]


def put_state(layer: Any, name: str, state: Tensor) -> None:
    """Gives a fresh layer a state that another one had by this name."""
    attribute, number = name.rsplit(".", 1)
    layer.lazy_initialization(**{attribute: state, "state_idx": int(number)})
    getattr(layer, attribute)[int(number)].copy_(state)
    if attribute == "conv_states":
        layer.has_previous_state[int(number)] = True


def write_index(cache: Saved, path: Path, files: list[File], facts: Mapping[str, Any]) -> None:
    for rank, file in enumerate(files):
        place = path / file.name
        if not place.exists() or place.stat().st_size != file.size:
            raise OSError(
                f"TreeCache.save: rank 0 does not find {place} with the {file.size} bytes that "
                f"rank {rank} wrote; give all ranks a path at which they reach the same directory"
            )
    layout = cache.shard.layout
    arguments = dataclasses.asdict(layout)  # type: ignore[call-overload]
    tensor_rank, tensor_parallel_size = cache.shard.column
    index = {
        "format": _FORMAT,
        "version": _VERSION,
        "model": cache.model,
        "tensor_rank": tensor_rank,
        "tensor_parallel_size": tensor_parallel_size,
        "length": cache.common_length("save"),
        # Without shares the index is one that releases before them read.
        "layout": {
            "kind": type(layout).__name__,
            **{name: value for name, value in arguments.items() if value is not None},
        },
        "layers": layers_of(cache),
        "first_slots": [layer.first for layer in cache.kv_layers],
        "states": kinds_of_states(cache),
        "files": [file._asdict() for file in files],
        # Without these the index is one that releases before them wrote.
        **{name: value for name, value in facts.items() if value is not None},
    }
    index["sha256"] = digest_of(index)
    unfinished = path / f"{PREFIX}index.{os.getpid()}.tmp"
    try:
        unfinished.write_text(json.dumps(index, indent=1) + "\n")
        to_disk(unfinished)
        unfinished.replace(path / INDEX)
    finally:
        unfinished.unlink(missing_ok=True)
    to_disk(path)
    kept = {file.name for file in files}
    for old in path.glob(f"{PREFIX}*"):
        if old.name not in kept and _OWN_NAME.fullmatch(old.name):
            with suppress(OSError):  # the save is whole, whether or not older files can be removed
                old.unlink()


def remove_unless_named(path: Path, name: str) -> None:
    """Removes a file of a save that failed, if the index of the directory does not name it."""
    with suppress(OSError):
        try:
            with open_regular(path / INDEX) as file:
                content = file.read()
        except FileNotFoundError:
            content = b""
        if name.encode() not in content:
            (path / name).unlink()


def digest_of(index: Mapping[str, Any]) -> str:
    """The SHA-256 of an index without its own digest, however its JSON is written."""
    entries = {name: value for name, value in index.items() if name != "sha256"}
    canonical = json.dumps(entries, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def read_index(path: Path, cache: Saved) -> Index:
    """The index of a directory, if it is whole and of a cache such as this one."""
    file = path / INDEX
    try:
        entries = read_entries(file)
    except FileNotFoundError:
        raise FileNotFoundError(
            f"TreeCache.load: {path} has no {INDEX}: no cache was saved there, or it never ended"
        ) from None
    try:
        _check_model(entries, cache)
        return _parsed(entries)
    except (ValueError, TypeError, RecursionError) as error:
        raise _unusable(file, error) from None


def read_entries(file: Path) -> dict[str, Any]:
    """The entries of an index that is whole and of a version that this release reads."""
    entries = read_json_object(file, "TreeCache.load:")
    try:
        if entries.get("format") != _FORMAT:
            raise ValueError(f"its format is not {_FORMAT!r}")
        if entries.get("version") not in _READ:
            version, read = reprlib.repr(entries.get("version")), " and ".join(map(str, _READ))
            raise ValueError(f"it is of version {version}, and this release reads {read}")
        # Without this: a damaged index is followed.
        if entries.get("sha256") != digest_of(entries):
            raise ValueError("it is damaged: its sha256 is not that of the rest")
        length, tokens = entries.get("length"), entries.get("tokens")
        if tokens is not None and not (
            type(tokens) is list
            and len(tokens) == length
            and all(type(x) is int and 0 <= x < _BOUND for x in tokens)
        ):
            raise ValueError(f"its tokens must be {length} ids, got {reprlib.repr(tokens)}")
    except (ValueError, TypeError, RecursionError) as error:
        raise _unusable(file, error) from None
    return entries


def _unusable(file: Path, error: Exception) -> ValueError:
    return ValueError(f"TreeCache.load: {file} cannot be used: {error}")


def _parsed(entries: Mapping[str, Any]) -> Index:
    length = _integer("length", entries.get("length"))
    layout = _parsed_layout(_entry(entries, "layout", dict))
    files = [
        File(
            _entry(file, "name", str),
            _entry(file, "sha256", str),
            _integer("size of a file", file.get("size")),
        )
        for file in _entry(entries, "files", list, of=dict)
    ]
    if len(files) != layout.world_size:
        raise ValueError(f"it names {len(files)} files for {layout.world_size} ranks")
    for file in files:
        if not _OWN_NAME.fullmatch(file.name):  # of this directory, not of any other
            raise ValueError(f"{file.name!r} is no name of a file")
    if sum(layout.count(rank, length) for rank in range(layout.world_size)) != length:
        raise ValueError(f"{layout} has no rank for slot {length - 1}")
    layers = [_parsed_layer(layer) for layer in _entry(entries, "layers", list, of=dict)]
    first_slots = _entry(entries, "first_slots", list, of=int)
    states = [_parsed_states(layer) for layer in _entry(entries, "states", list, of=dict)]
    return Index(entries["sha256"], length, layout, layers, first_slots, states, files)


def _parsed_layout(entries: Mapping[str, Any]) -> ShardLayout:
    kind = _one_of("kind of the layout", entries.get("kind"), LAYOUTS)
    arguments = {name: value for name, value in entries.items() if name != "kind"}
    numbers = [0]
    for name, value in arguments.items():
        numbers += [_integer(name, x) for x in (value if isinstance(value, list) else [value])]
    layout = kind(**arguments)
    cycle = layout.world_size * max(numbers)
    if isinstance(layout, BlockCyclic):
        _, _, cycle = layout.key_layout(0)
    _integer("number of slots in a cycle of the layout", cycle)
    return layout


def _entry(entries: Mapping[str, Any], name: str, kind: type[T], of: type | None = None) -> T:
    """Return an entry of the index, after a check of its type and, in a list, of its elements."""
    found = entries.get(name)
    if type(found) is not kind or (of and any(type(x) is not of for x in entries[name])):
        expected = kind.__name__ + (f" of {of.__name__}" if of else "")
        raise ValueError(f"{name} must be a {expected}, got {reprlib.repr(found)}")
    return found


def _integer(name: str, value: Any) -> int:
    if type(value) is not int or not 0 <= value < _BOUND:
        raise ValueError(
            f"{name} must be an integer of at least 0 and below 2^63, got {reprlib.repr(value)}"
        )
    return value


def _one_of(name: str, value: Any, known: Mapping[str, T]) -> T:
    if not isinstance(value, str) or value not in known:
        raise ValueError(f"{name} must be one of {', '.join(known)}, got {reprlib.repr(value)}")
    return known[value]


def _parsed_layer(entries: Mapping[str, Any]) -> Kinds:
    dtype = _one_of("dtype of a layer", entries.get("dtype"), _DTYPES)
    shape = _entry(entries, "shape", list, of=int)
    if len(shape) != 4 or min(shape) < 0 or math.prod(size + 1 for size in shape) >= _BOUND // 8:
        raise ValueError(f"a layer cannot have the sizes {shape}")
    *batch_and_heads, head_dim, head_dim_v = shape
    kinds = {
        "keys": (dtype, [*batch_and_heads, head_dim]),
        "values": (dtype, [*batch_and_heads, head_dim_v]),
    }
    if dtype in KV_DTYPES.values():
        kinds |= dict.fromkeys(("k_scale", "v_scale"), (torch.float32, batch_and_heads))
    if "index" in entries:
        index = _entry(entries, "index", dict)
        dtype = _one_of("dtype of an index", index.get("dtype"), _DTYPES)
        columns = _integer("columns of an index", index.get("columns"))
        if (batch_and_heads[0] + 1) * (columns + 1) >= _BOUND // 8:
            raise ValueError(f"an index cannot have {columns} columns")
        kinds["index_keys"] = dtype, [batch_and_heads[0], 1, columns]
    return kinds


def _parsed_states(entries: Mapping[str, Any]) -> Kinds:
    kinds: Kinds = {}
    for name in entries:
        if not _STATE.fullmatch(name):
            raise ValueError(f"{name!r} is no state of a layer")
        kind: list[Any] = _entry(entries, name, list)
        dtype: Any
        shape: Any
        dtype, shape = kind if len(kind) == 2 else [None, None]
        known = _one_of("dtype of a state", dtype, _DTYPES)
        is_list = type(shape) is list and all(type(n) is int and n >= 0 for n in shape)
        if not is_list or math.prod(n + 1 for n in shape) >= _BOUND // 8:
            raise ValueError(f"a state cannot have the sizes {reprlib.repr(shape)}")
        kinds[name] = known, shape
    return kinds


def _check_model(entries: Mapping[str, Any], cache: Saved) -> None:
    saved = _entry(entries, "model", dict)
    for name, value in cache.model.items():
        if saved.get(name) != value:
            raise ValueError(
                f"it is of another model: its {name} is {saved.get(name)!r}, and that of config "
                f"{value!r}"
            )
    column = entries.get("tensor_rank"), entries.get("tensor_parallel_size")
    # Without this: the heads of another tensor rank are loaded.
    if column != cache.shard.column:
        texts = ["{!r} of {!r}".format(*place) for place in (column, cache.shard.column)]
        raise ValueError(
            f"it holds the heads of tensor rank {texts[0]}, and the group is of tensor rank "
            f"{texts[1]}: load what the context group with the same heads saved"
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
