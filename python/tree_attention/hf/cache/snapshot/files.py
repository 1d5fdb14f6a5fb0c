# SPDX-License-Identifier: BSD-3-Clause
"""A `TreeCache` in a directory: a safetensors file per rank, and an index that names them.

A save writes files with new names, keeps the files of the last save, and then replaces the index,
which alone says what belongs together. So an interrupted save leaves the last one whole.
"""

import copy
import hashlib
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ...._json import open_regular
from ....exchange import Signature, on_every_rank, sentence
from ....ops import append_kv
from ....sharding import ShardLayout
from ..growing import TreeCacheLayer, check_room
from .index import (
    INDEX,
    LAYOUTS,
    PREFIX,
    File,
    Index,
    Kinds,
    Saved,
    kv_dtype_of,
    put_state,
    read_index,
    remove_unless_named,
    states_of,
    to_disk,
    write_index,
)
from .tokens import token_ids

Cache = TypeVar("Cache", bound=Saved)

# How many times a cache is read again when another save has removed the files of its index.
_READINGS = 5


def save(
    cache: Saved,
    directory: str | os.PathLike[str],
    tokens: Any,
    facts: Mapping[str, str] | None = None,
) -> None:
    """`TreeCache.save`; the index has `facts` too, which are names and values of the caller."""
    shard, path = cache.shard, Path(directory)
    comm, rank, timeout = shard.comm, shard.rank, shard.timeout
    file: File | None = None
    ids: list[int] | None = None

    def write() -> tuple[Signature, File]:
        nonlocal file, ids
        length = cache.common_length("save")
        kind = type(shard.layout).__name__
        if type(shard.layout) is not LAYOUTS.get(kind):
            raise ValueError(
                f"TreeCache.save: the layout must be one of {', '.join(LAYOUTS)}, got {kind}; "
                "reshard the cache first"
            )
        if length == 0 or not all(layer.is_initialized for layer in cache.kv_layers):
            raise ValueError("TreeCache.save: the cache holds no tokens yet; run the model first")
        if tokens is not None:
            ids = _ids_of_the_row(cache, length, tokens)
        given = None if ids is None else hashlib.sha256(str(ids).encode()).hexdigest()
        path.mkdir(parents=True, exist_ok=True)
        file = _write_tensors(cache, path)
        signature = ("layout", shard.layout), ("tokens", given)
        return (*cache.signature("save"), *signature), file

    try:
        _, notes = on_every_rank("TreeCache.save", comm, timeout, write, File.note)

        def name_files() -> tuple[Signature, None]:
            if rank == 0:
                entries = {"tokens": ids, "facts": facts}
                write_index(cache, path, [File(**note["file"]) for note in notes], entries)
            return (), None

        on_every_rank("TreeCache.save", comm, timeout, name_files)
    except Exception:
        # An index that names the file may still come where this rank only waited in vain.
        if file is not None and (rank == 0 or comm.failed is None):
            remove_unless_named(path, file.name)
        raise


def restore(empty: Cache, directory: str | os.PathLike[str]) -> Cache:
    """A copy of an empty cache with what `save` wrote, of any world size and layout."""
    shard, path = empty.shard, Path(directory)

    def read() -> tuple[Signature, Cache]:
        for number in range(1, _READINGS + 1):
            cache = copy.deepcopy(empty)
            try:
                index = read_index(path, cache)
                _read_tensors(cache, path, index)
                break
            except FileNotFoundError:  # maybe a save at the same time has replaced the index
                if number == _READINGS:
                    raise
            except OSError as error:  # of the system, which knows of no TreeCache
                text = f"TreeCache.load: {error.strerror}"
                raise OSError(error.errno, text, error.filename) from None
        return (
            ("digest of the index", index.sha256[:16]),
            ("layout", shard.layout),
            ("kv_dtype", cache.kv_dtype),
        ), cache

    cache, _ = on_every_rank("TreeCache.load", shard.comm, shard.timeout, read)
    return cache


def _ids_of_the_row(cache: Saved, length: int, tokens: Any) -> list[int]:
    """The ids of all tokens of a cache of one sequence, or an error."""
    ids, num_rows = token_ids("TreeCache.save", tokens), len(cache.kv_layers[0].key_rows)
    if num_rows != 1:
        raise ValueError(
            f"TreeCache.save: tokens are kept of a cache of one sequence, got {num_rows}; leave "
            "them out, or take one with batch_select_indices, in a copy.deepcopy"
        )
    if len(ids) != length:
        raise ValueError(
            f"TreeCache.save: tokens must be the {length} that the cache holds, got {len(ids)}; of "
            "what generate returned these are all but the last"
        )
    return ids


def _write_tensors(cache: Saved, path: Path) -> File:
    shard = cache.shard
    tensors = {
        f"layers.{i}.{name}": x[:, :, layer.held()].contiguous().cpu()
        for i, layer in enumerate(cache.kv_layers)
        for name, x in layer.buffers().items()
    }
    if shard.rank == 0:  # they are the same on all ranks
        tensors |= {
            f"states.{i}.{name}": x.contiguous().cpu()
            for i, layer in enumerate(cache.state_layers)
            for name, x in states_of(layer).items()
        }
    place = f"{shard.rank:05}-of-{shard.world_size:05}"
    unfinished = path / f"{PREFIX}{place}.{os.getpid()}.tmp"
    try:
        try:
            save_file(tensors, unfinished, {"layout": str(shard.layout)})
        except SafetensorError as error:  # also where the disk is full
            raise OSError(
                f"TreeCache.save: {unfinished} cannot be written: {sentence(error)}"
            ) from None
        to_disk(unfinished)
        with open_regular(unfinished) as content:
            digest, size = _digest(content), os.fstat(content.fileno()).st_size
        name = f"{PREFIX}{place}-{digest[:16]}.safetensors"
        unfinished.replace(path / name)
    finally:
        unfinished.unlink(missing_ok=True)
    to_disk(path)  # the name of the file, before an index that relies on it
    return File(name, digest, size)


def _digest(file: BinaryIO) -> str:
    sha, block = hashlib.sha256(), bytearray(1 << 20)
    while size := file.readinto(block):  # type: ignore[attr-defined]
        sha.update(memoryview(block)[:size])
    return sha.hexdigest()


def _read_tensors(cache: Saved, path: Path, index: Index) -> None:
    shard, source = cache.shard, index.layout
    if len(index.layers) != len(cache.kv_layers):
        raise ValueError(
            f"TreeCache.load: {path} holds {len(index.layers)} layers, and the model has "
            f"{len(cache.kv_layers)}"
        )
    for i, (layer, kinds) in enumerate(zip(cache.kv_layers, index.layers, strict=True)):
        saved = kinds["index_keys"][1][2] if "index_keys" in kinds else 0
        if saved != layer.index_columns:
            raise ValueError(
                f"TreeCache.load: {path} holds index keys of {saved} columns in layer {i}, and "
                f"the model's have {layer.index_columns}"
            )
    numbers = [layer.number_of_states for layer in cache.state_layers]
    if len(index.states) != len(numbers) or not all(
        int(name.rsplit(".", 1)[1]) < number
        for kinds, number in zip(index.states, numbers, strict=True)
        for name in kinds
    ):
        raise ValueError(
            f"TreeCache.load: {path} holds the states of {len(index.states)} layers, and the model "
            f"has {len(numbers)} that keep {numbers} states"
        )
    # What the next token sees must be there: all slots, or the slots of its window.
    most = [max(0, index.length - (layer.window or index.length)) for layer in cache.kv_layers]
    if len(index.first_slots) != len(most) or not all(
        type(first) is int and 0 <= first <= limit
        for first, limit in zip(index.first_slots, most, strict=True)
    ):
        raise ValueError(
            f"TreeCache.load: {path / INDEX} lacks slots that the cache needs, with "
            f"{shard.blocks.option} all: first_slots of the layers must be slots up to {most}, "
            f"got {index.first_slots}"
        )
    _check_sizes(path, index)
    shard.check_holds(index.length)
    slots, owners = {}, {}
    pairs = zip(cache.kv_layers, index.first_slots, strict=True)
    firsts = [layer.first_kept(first, index.length) for layer, first in pairs]
    for first in {*firsts}:
        slots[first] = shard.layout.local_slots(shard.rank, first, index.length)
        owners[first] = source.owner(slots[first])
    with torch.inference_mode(False), torch.no_grad():
        layers = [*zip(cache.kv_layers, index.layers, index.first_slots, firsts, strict=True)]
        for layer, kinds, _, first in layers:
            _prepare(layer, first, index.length, kinds)
        check_room(cache.kv_layers, shard.count(index.length))
        for layer in cache.kv_layers:
            layer.grow(shard.count(index.length))
        for rank, file in enumerate(index.files):
            rows = {first: (owner == rank).nonzero()[:, 0] for first, owner in owners.items()}
            has_states = rank == 0 and len(index.states) > 0
            if not has_states and not any(len(found) for found in rows.values()):
                continue
            place = path / file.name
            with _opened(place, file.sha256, source) as handle:
                if has_states:
                    _put_states(cache, index.states, place, handle)
                for i, (layer, kinds, saved, first) in enumerate(layers):
                    if len(rows[first]) == 0:
                        continue
                    begin = source.count(rank, saved)
                    count = source.count(rank, index.length) - begin
                    found = {
                        name: _tensor(place, handle, f"layers.{i}.{name}", kind, count)
                        for name, kind in kinds.items()
                    }
                    local = source.count(rank, slots[first][rows[first]]) - begin
                    part = {name: x.index_select(2, local) for name, x in found.items()}
                    places = layer.places(rows[first] + shard.count(first))
                    _put(layer, places, part, kv_dtype_of(kinds))
    for layer in cache.kv_layers:
        layer.length = index.length


def _put_states(cache: Saved, states: list[Kinds], place: Path, handle: Any) -> None:
    for i, (layer, kinds) in enumerate(zip(cache.state_layers, states, strict=True)):
        for name, kind in kinds.items():
            found = _tensor(place, handle, f"states.{i}.{name}", kind)
            # Where the model is: unlike keys, a state does not learn it from a later token.
            put_state(layer, name, found.to(torch.get_default_device()))


def _check_sizes(path: Path, index: Index) -> None:
    """Checks the sizes in the index, before anything is allocated by them."""
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
        if rank == 0:
            least += sum(
                math.prod(shape) * dtype.itemsize
                for kinds in index.states
                for dtype, shape in kinds.values()
            )
        with _regular(place) as content:
            size = os.fstat(content.fileno()).st_size
        if not least <= size == file.size:
            raise ValueError(
                f"TreeCache.load: {place} is damaged: it has {size} bytes, and by the index "
                f"{file.size}, at least {least} of them tensors; copy or save it again"
            )


def _prepare(layer: TreeCacheLayer, first: int, length: int, kinds: Kinds) -> None:
    saved = kv_dtype_of(kinds)
    if layer.kv_dtype is None:
        layer.kv_dtype = saved

    def empty(name: str) -> Tensor:
        dtype, (batch, num_heads_kv, head_dim) = kinds[name]
        dtype = dtype if saved is None else torch.float32
        return torch.empty((batch, num_heads_kv, 0, head_dim), dtype=dtype, device="cpu")

    if "index_keys" in kinds:
        layer.index_dtype = kinds["index_keys"][0]
    layer.first, layer.length = first, length
    layer.dropped = layer.shard.count(first)
    layer.lazy_initialization(empty("keys"), empty("values"))


def _put(
    layer: TreeCacheLayer, places: Tensor, part: Mapping[str, Tensor], saved: torch.dtype | None
) -> None:
    """Writes what was saved of some slots to these places of a layer."""
    if layer.kv_dtype == saved:
        for name, target in layer.buffers().items():
            target[:, :, places] = part[name]
        return
    if "index_keys" in part:  # which have no other dtype
        layer.index_keys[:, :, places] = part["index_keys"]
    keys, values = part["keys"], part["values"]
    if saved is not None:
        keys = keys.float() * part["k_scale"][..., None]
        values = values.float() * part["v_scale"][..., None]
    slots = places.expand(len(keys), -1)
    append_kv(keys, values, layer.key_rows, layer.value_rows, slots, **layer.scales())


def _regular(path: Path) -> BinaryIO:
    """A file that the index names, for reading."""
    try:
        return open_regular(path)
    except FileNotFoundError:
        raise FileNotFoundError(
            f"TreeCache.load: {path} is missing, which the index names; copy the whole directory, "
            "or load it again if another save has just replaced it"
        ) from None


def _opened(path: Path, digest: str, layout: ShardLayout) -> Any:
    """A file that is as it was saved, mapped into memory."""
    with _regular(path) as content:
        found = _digest(content)
        # Without this: a file of another save is loaded.
        if found != digest:
            raise ValueError(
                f"TreeCache.load: {path} is damaged: its SHA-256 is {found[:16]}..., and by the "
                f"index {digest[:16]}...; copy or save it again"
            )
        try:
            # The file of this digest, whatever has become of its name since.
            handle: Any = safe_open(f"/dev/fd/{content.fileno()}", framework="pt")
        except SafetensorError as error:
            raise ValueError(f"TreeCache.load: {path} is damaged: {sentence(error)}") from None
    saved = (handle.metadata() or {}).get("layout")
    if saved != str(layout):
        raise ValueError(
            f"TreeCache.load: {path} was saved with the layout {saved}, and by the index with "
            f"{layout}; copy or save it again"
        )
    return handle


def _tensor(
    path: Path,
    handle: Any,
    name: str,
    kind: tuple[torch.dtype, list[int]],
    count: int | None = None,
) -> Tensor:
    """A tensor of a file. With a `count` it has so many slots, which `kind` leaves out."""
    try:
        found: Tensor = handle.get_tensor(name)
    except SafetensorError as error:
        raise ValueError(f"TreeCache.load: {path} lacks {name}: {sentence(error)}") from None
    dtype, sizes = kind
    shape = sizes if count is None else [*sizes[:2], count, *sizes[2:]]
    if (found.dtype, list(found.shape)) != (dtype, shape):
        raise ValueError(
            f"TreeCache.load: {path}: {name} is of {found.dtype} and shape {list(found.shape)}, "
            f"and by the index of {dtype} and {shape}"
        )
    return found
