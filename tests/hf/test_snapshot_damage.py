# SPDX-License-Identifier: BSD-3-Clause
"""Directories of saved caches that cannot be loaded: damage is an error on every rank."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from distributed import run_ranks

pytest.importorskip("transformers")

from faults import AMPLE
from hf_caches import append
from test_snapshot import CONFIG, LENGTH, check_load, filled
from tree_attention import BlockCyclic, ExchangeError, hf
from tree_attention.hf.cache.snapshot import files as snapshot
from tree_attention.hf.cache.snapshot.index import digest_of


def edit_index(**changes: Any) -> Callable[[Path], None]:
    """As whoever can write the index can: with its digest."""

    def edit(directory: Path) -> None:
        file = directory / "index.json"
        index = json.loads(file.read_text()) | changes
        file.write_text(json.dumps(index | {"sha256": digest_of(index)}))

    return edit


def _tensors(directory: Path) -> Path:
    return next(directory.glob("cache-00000*.safetensors"))


def _flip(directory: Path) -> None:
    file = _tensors(directory)
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def _truncate(directory: Path) -> None:
    file = _tensors(directory)
    file.write_bytes(file.read_bytes()[:-100])


def _write_index(content: str) -> Callable[[Path], None]:
    def write(directory: Path) -> None:
        (directory / "index.json").write_text(content, errors="surrogateescape")

    return write


def _without_digest(directory: Path) -> None:
    file = directory / "index.json"
    index = json.loads(file.read_text())
    del index["sha256"]
    file.write_text(json.dumps(index))


def _nested(depth: int) -> dict[str, Any]:
    return {"a": _nested(depth - 1)} if depth else {}


def _replace_by_fifo(pattern: str) -> Callable[[Path], None]:
    def replace(directory: Path) -> None:
        (file,) = directory.glob(pattern)
        file.unlink()
        os.mkfifo(file)

    return replace


def _replace_by_directory(directory: Path) -> None:
    (directory / "index.json").unlink()
    (directory / "index.json").mkdir()


def _layers_of(*shape: int, dtype: str = "float32") -> Callable[[Path], None]:
    return edit_index(layers=[{"dtype": dtype, "shape": shape}] * 2)


DAMAGES: dict[str, tuple[Callable[[Path], object], type[Exception], str]] = {
    "no index": (lambda d: (d / "index.json").unlink(), FileNotFoundError, "has no index.json"),
    "no JSON": (
        _write_index("{"),
        ValueError,
        "index.json: it is no JSON: Expecting property name",
    ),
    "no UTF-8": (
        _write_index('{"\udcff": 1}'),
        ValueError,
        "index.json: it is no JSON: 'utf-8' codec can't",
    ),
    "a list": (_write_index("[]"), ValueError, "index.json: it must hold a JSON object, got list"),
    "a name twice": (
        _write_index('{"a": 1, "a": 2}'),
        ValueError,
        "index.json: it is no JSON: it gives a name tw",
    ),
    "deep": (_write_index('{"a": ' + "[" * 100_000), ValueError, "it is nested too deeply"),
    "deep, yet JSON": (edit_index(model=_nested(400)), ValueError, "is of another model"),
    "a FIFO": (_replace_by_fifo("index.json"), OSError, "it is no regular file: '"),
    "a FIFO of tensors": (
        _replace_by_fifo("cache-0*"),
        OSError,
        "it is no regular file: '",
    ),
    "a directory": (_replace_by_directory, OSError, "it is no regular file: '"),
    "another format": (edit_index(format="x"), ValueError, "its format is not"),
    "the version before": (edit_index(version=1), ValueError, "of version 1, and this release rea"),
    "no digest": (_without_digest, ValueError, "it is damaged: its sha256 is not that of the rest"),
    "no layout": (edit_index(layout=None), ValueError, "layout must be a dict, got None"),
    "an unknown layout": (
        edit_index(layout={"kind": "x"}),
        ValueError,
        "kind of the layout must be one of BlockCyclic, Contiguous, ContiguousThenCyclic, got 'x'",
    ),
    "another argument": (
        edit_index(layout={"kind": "BlockCyclic", "world_size": 1, "x": 1}),
        ValueError,
        "cannot be used: BlockCyclic.__init__() got an unexpected keyword argument 'x'",
    ),
    "a vast block": (
        edit_index(layout={"kind": "BlockCyclic", "world_size": 1, "block": 1 << 70}),
        ValueError,
        "block must be an integer of at least 0 and below 2^63, got 1180591620717411303424",
    ),
    "vast cycles": (
        edit_index(layout={"kind": "BlockCyclic", "world_size": 2, "block": 1 << 62}),
        ValueError,
        "number of slots in a cycle of the layout must be an integer",
    ),
    "vast cycles by shares": (
        edit_index(
            layout={"kind": "BlockCyclic", "world_size": 2, "block": 1 << 54, "shares": [1, 1023]}
        ),
        ValueError,
        "number of slots in a cycle of the layout must be an integer",
    ),
    "shares of another world": (
        edit_index(layout={"kind": "BlockCyclic", "world_size": 1, "shares": [1, 2]}),
        ValueError,
        "BlockCyclic: shares must be an integer from 0 to 1,024 for each of 1 ranks",
    ),
    "shares that are none": (
        edit_index(layout={"kind": "BlockCyclic", "world_size": 1, "shares": None}),
        ValueError,
        "shares must be an integer of at least 0 and below 2^63, got None",
    ),
    "bounds of bounds": (
        edit_index(layout={"kind": "Contiguous", "bounds": [0, [1]]}),
        ValueError,
        "bounds must be an integer of at least 0 and below 2^63, got [1]",
    ),
    "a layout that ends before": (
        edit_index(layout={"kind": "Contiguous", "bounds": [0, 50]}),
        ValueError,
        "Contiguous(bounds=(0, 50)) has no rank for slot 76",
    ),
    "another layout": (
        edit_index(layout={"kind": "BlockCyclic", "world_size": 1, "block": 24}),
        ValueError,
        "was saved with the layout BlockCyclic(world_size=1, block=64), and by the index with",
    ),
    "heads of another rank": (
        edit_index(tensor_rank=1, tensor_parallel_size=2),
        ValueError,
        "it holds the heads of tensor rank 1 of 2, and the group is of tensor rank 0 of 1: load",
    ),
    "wrong world": (
        edit_index(layout={"kind": "BlockCyclic", "world_size": 3, "block": 64}),
        ValueError,
        "names 1 files for 3 ranks",
    ),
    "negative length": (edit_index(length=-1), ValueError, "length must be an integer"),
    "length of another kind": (edit_index(length="1"), ValueError, "below 2^63, got '1'"),
    "longer": (edit_index(length=LENGTH + 1), ValueError, "of them tensors"),
    "far longer": (edit_index(length=10**17), ValueError, "of them tensors"),
    "files of another kind": (edit_index(files=[1]), ValueError, "files must be a list of dict, g"),
    "a file without a name": (edit_index(files=[{}]), ValueError, "name must be a str, got None"),
    "a foreign file": (
        edit_index(files=[{"name": "../x.safetensors", "sha256": "", "size": 1}]),
        ValueError,
        "is no name of a file",
    ),
    "another model": (edit_index(model={}), ValueError, "is of another model: its model_type"),
    "no dtype": (
        _layers_of(2, 2, 8, 8, dtype="int64"),
        ValueError,
        "dtype of a layer must be one of int8, float8_e4m3fn, float16, bfloat16, float32, float64",
    ),
    "another dtype": (
        _layers_of(2, 2, 8, 8, dtype="float16"),
        ValueError,
        "layers.0.keys is of torch.float32 and shape [2, 2, 77, 8], and by the index of torch.flo",
    ),
    "no scales": (_layers_of(2, 2, 8, 8, dtype="int8"), ValueError, "by the index of torch.int8"),
    "other heads": (
        _layers_of(1, 4, 8, 8),
        ValueError,
        "by the index of torch.float32 and [1, 4, 77, 8]",
    ),
    "vast heads": (_layers_of(10**6, 10**6, 8, 8), ValueError, "of them tensors"),
    "vaster heads": (
        _layers_of(10**9, 10**9, 8, 8),
        ValueError,
        "a layer cannot have the sizes [1000000000, 1000000000, 8, 8]",
    ),
    "negative heads": (
        _layers_of(-2, -2, 8, 8),
        ValueError,
        "a layer cannot have the sizes [-2, -2, 8, 8]",
    ),
    "no head_dim": (_layers_of(2, 2), ValueError, "a layer cannot have the sizes [2, 2]"),
    "a missing layer": (
        edit_index(layers=[{"dtype": "float32", "shape": [2, 2, 8, 8]}]),
        ValueError,
        "holds 1 layers, and the model",
    ),
    "tokens of another number": (
        edit_index(tokens=[1, 2]),
        ValueError,
        "its tokens must be 77 ids, got [1, 2]",
    ),
    "tokens that are no ids": (
        edit_index(tokens=[-1] * LENGTH),
        ValueError,
        "its tokens must be 77 ids, got [-1, -1,",
    ),
    "states of another kind": (edit_index(states=1), ValueError, "states must be a list of dict,"),
    "states of other layers": (edit_index(states=[{}]), ValueError, "holds the states of 1 layers"),
    "a state of no kind": (
        edit_index(states=[{"keys.0": ["float32", [1]]}]),
        ValueError,
        "'keys.0' is no state of a layer",
    ),
    "a state of no dtype": (
        edit_index(states=[{"conv_states.0": ["int64", [1]]}]),
        ValueError,
        "dtype of a state must be one of",
    ),
    "a vast state": (
        edit_index(states=[{"conv_states.0": ["float32", [10**19]]}]),
        ValueError,
        "a state cannot have the sizes [10000000000000000000]",
    ),
    "a missing file": (lambda d: _tensors(d).unlink(), FileNotFoundError, "is missing, which the"),
    "a flipped bit": (_flip, ValueError, "is damaged: its SHA-256 is"),
    "a truncated file": (_truncate, ValueError, "is damaged: it has"),
    "an empty file": (
        lambda d: _tensors(d).write_bytes(b""),
        ValueError,
        "damaged: it has 0 bytes",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_directory_is_refused(damage: str, tmp_path: Path) -> None:
    apply, kind, message = DAMAGES[damage]
    filled().save(tmp_path)
    apply(tmp_path)
    with pytest.raises(kind) as caught:
        hf.TreeCache.load(tmp_path, CONFIG)
    assert message in str(caught.value)
    assert str(tmp_path) in str(caught.value)
    assert caught.value.__cause__ is None  # a program's traceback shows this sentence alone


@pytest.mark.deep
def test_any_flipped_bit_of_the_index_is_found(tmp_path: Path) -> None:
    filled().save(tmp_path)
    file = tmp_path / "index.json"
    content = file.read_bytes()
    assert b'"block": 64' in content
    for i in range(0, len(content) - 1, 3):  # behind the last byte, white space is as good
        flipped = bytearray(content)
        flipped[i] ^= 1 << i % 8
        file.write_bytes(flipped)
        with pytest.raises(ValueError, match=r"TreeCache\.load: .*index\.json"):
            hf.TreeCache.load(tmp_path, CONFIG)
    file.write_bytes(content)
    check_load(0, 1, BlockCyclic(1), tmp_path)


def test_files_of_other_tensors_are_refused(tmp_path: Path) -> None:
    """Their digests may be right all the same."""
    filled().save(tmp_path)
    file = _tensors(tmp_path)
    for content, message in (
        (b"no tensors" * 10_000, "is damaged: (?!it has)"),
        (_saved_tensors(tmp_path), "lacks layers.0.keys"),
    ):
        file.write_bytes(content)
        digest = hashlib.sha256(content).hexdigest()
        entry = {"name": file.name, "sha256": digest, "size": len(content)}
        edit_index(files=[entry])(tmp_path)
        with pytest.raises(ValueError, match=message):
            hf.TreeCache.load(tmp_path, CONFIG)


def _saved_tensors(directory: Path) -> bytes:
    path = directory / "other"
    layout = {"layout": str(BlockCyclic(1, 64))}
    snapshot.save_file({"x": torch.zeros(10_000)}, path, layout)
    return path.read_bytes()


def _load_elsewhere(rank: int, world_size: int, directories: list[Path]) -> str:
    with pytest.raises((OSError, ValueError, ExchangeError)) as caught:
        hf.TreeCache.load(directories[rank], CONFIG, timeout=AMPLE)
    check_load(rank, world_size, BlockCyclic(2), directories[0])  # the group is as it was
    return f"{type(caught.value).__name__}: {caught.value}"


def test_damage_on_one_rank_is_an_error_on_all(tmp_path: Path) -> None:
    filled().save(tmp_path / "a")
    filled().save(tmp_path / "b")
    _flip(tmp_path / "b")
    errors = run_ranks(_load_elsewhere, 2, [tmp_path / "a", tmp_path / "b"])
    assert errors[0].startswith("ExchangeError: rank 0 of 2: outcome is TreeCache.load: ")
    assert errors[1].startswith("ValueError: TreeCache.load:")


def test_ranks_that_load_different_saves_raise(tmp_path: Path) -> None:
    filled().save(tmp_path / "a")
    cache = filled()
    append(cache, 1)
    cache.save(tmp_path / "b")
    errors = run_ranks(_load_elsewhere, 2, [tmp_path / "a", tmp_path / "b"])
    for error in errors:
        assert error.startswith("ExchangeError:") and "digest of the index" in error


def _load_as(rank: int, world_size: int, directory: Path, kv_dtypes: list[str | None]) -> str:
    with pytest.raises(ExchangeError) as caught:
        hf.TreeCache.load(directory, CONFIG, kv_dtype=kv_dtypes[rank], timeout=AMPLE)
    return str(caught.value)


def test_ranks_that_load_different_kv_dtypes_raise(tmp_path: Path) -> None:
    filled().save(tmp_path)
    for error in run_ranks(_load_as, 2, tmp_path, [None, "int8"]):
        assert "kv_dtype is torch.int8 on rank 1, None on rank 0" in error
