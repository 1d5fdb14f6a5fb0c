# SPDX-License-Identifier: BSD-3-Clause
"""Directories of saved caches that cannot be loaded: damage is an error on every rank."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from distributed import run_ranks

pytest.importorskip("transformers")

from hf_caches import append
from test_snapshot import CONFIG, LENGTH, _check_load, _filled
from tree_attention import BlockCyclic, ExchangeError, hf
from tree_attention.hf import snapshot


def _edit_index(**changes: Any) -> Callable[[Path], None]:
    def edit(directory: Path) -> None:
        file = directory / "index.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

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


def _layer_of(shape: list[int]) -> dict[str, Any]:
    return {name: {"dtype": "float32", "shape": shape} for name in ("keys", "values")}


_LAYER = _layer_of([2, 2, 8])

DAMAGES: dict[str, tuple[Callable[[Path], object], type[Exception], str]] = {
    "no index": (lambda d: (d / "index.json").unlink(), FileNotFoundError, "has no index.json"),
    "no JSON": (lambda d: (d / "index.json").write_text("{"), ValueError, "cannot be used"),
    "a list": (lambda d: (d / "index.json").write_text("[]"), ValueError, "its format is not"),
    "another format": (_edit_index(format="x"), ValueError, "its format is not"),
    "another version": (_edit_index(version=2), ValueError, "of version 2, and this release rea"),
    "no layout": (_edit_index(layout={"kind": "x"}), ValueError, "cannot be used: 'x'"),
    "wrong world": (
        _edit_index(layout={"kind": "BlockCyclic", "world_size": 3, "block": 64}),
        ValueError,
        "names 1 files for 3 ranks",
    ),
    "negative length": (_edit_index(length=-1), ValueError, "length must be an integer"),
    "longer": (_edit_index(length=LENGTH + 1), ValueError, "bytes, and by the index at least"),
    "far longer": (_edit_index(length=10**17), ValueError, "bytes, and by the index at least"),
    "a foreign file": (
        _edit_index(files=[{"name": "../x.safetensors", "sha256": ""}]),
        ValueError,
        "is no name of a file",
    ),
    "another model": (_edit_index(model={}), ValueError, "is of another model: its model_type"),
    "no dtype": (
        _edit_index(layers=[{**_LAYER, "keys": {"dtype": "int64", "shape": [2, 2, 8]}}] * 2),
        ValueError,
        "cannot be used: 'int64'",
    ),
    "other heads": (
        _edit_index(layers=[_layer_of([1, 4, 8])] * 2),
        ValueError,
        "by the index of torch.float32 and [1, 4, 77, 8]",
    ),
    "vast heads": (
        _edit_index(layers=[_layer_of([10**9, 10**9, 8])] * 2),
        ValueError,
        "bytes, and by the index at least",
    ),
    "negative heads": (
        _edit_index(layers=[_layer_of([-2, -2, 8])] * 2),
        ValueError,
        "keys of a layer cannot have the sizes [-2, -2, 8]",
    ),
    "no head_dim": (
        _edit_index(layers=[_layer_of([2, 2])] * 2),
        ValueError,
        "keys of a layer cannot have the sizes [2, 2]",
    ),
    "values of another dtype": (
        _edit_index(layers=[{**_LAYER, "values": {"dtype": "int8", "shape": [2, 2, 8]}}] * 2),
        ValueError,
        "values of a layer is of (torch.int8, [2, 2, 8]), expected (torch.float32, [2, 2, 8])",
    ),
    "no scales": (
        _edit_index(layers=[{**_LAYER, "keys": {"dtype": "int8", "shape": [2, 2, 8]}}] * 2),
        ValueError,
        "a layer has ['keys', 'values'], expected ['k_scale', 'keys', 'v_scale', 'values']",
    ),
    "a missing layer": (_edit_index(layers=[_LAYER]), ValueError, "holds 1 layers, and the model"),
    "a missing file": (lambda d: _tensors(d).unlink(), FileNotFoundError, "is missing, which the"),
    "a flipped bit": (_flip, ValueError, "is damaged: its SHA-256 is"),
    "a truncated file": (_truncate, ValueError, "is damaged: its SHA-256 is"),
    "an empty file": (
        lambda d: _tensors(d).write_bytes(b""),
        ValueError,
        "damaged: it has 0 bytes",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_directory_is_refused(damage: str, tmp_path: Path) -> None:
    apply, kind, message = DAMAGES[damage]
    _filled().save(tmp_path)
    apply(tmp_path)
    with pytest.raises(kind, match=r"TreeCache\.load: ") as caught:
        hf.TreeCache.load(tmp_path, CONFIG)
    assert message in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_files_of_other_tensors_are_refused(tmp_path: Path) -> None:
    """Their digests may be right all the same."""
    _filled().save(tmp_path)
    file = _tensors(tmp_path)
    for content, message in (
        (b"no tensors" * 10_000, "is damaged: (?!it has)"),
        (_saved_tensors(tmp_path), "lacks layers.0.keys"),
    ):
        file.write_bytes(content)
        _edit_index(files=[{"name": file.name, "sha256": snapshot._digest(file)}])(tmp_path)
        with pytest.raises(ValueError, match=message):
            hf.TreeCache.load(tmp_path, CONFIG)


def _saved_tensors(directory: Path) -> bytes:
    path = directory / "other"
    snapshot.save_file({"x": torch.zeros(10_000)}, path)
    return path.read_bytes()


def _load_elsewhere(rank: int, world_size: int, directories: list[Path]) -> str:
    with pytest.raises((OSError, ValueError, ExchangeError)) as caught:
        hf.TreeCache.load(directories[rank], CONFIG, timeout=10)
    _check_load(rank, world_size, BlockCyclic(2), directories[0])  # the group is as it was
    return f"{type(caught.value).__name__}: {caught.value}"


def test_damage_on_one_rank_is_an_error_on_all(tmp_path: Path) -> None:
    _filled().save(tmp_path / "a")
    _filled().save(tmp_path / "b")
    _flip(tmp_path / "b")
    errors = run_ranks(_load_elsewhere, 2, [tmp_path / "a", tmp_path / "b"])
    assert errors[0].startswith("ExchangeError: rank 0 of 2: outcome is TreeCache.load: ")
    assert errors[1].startswith("ValueError: TreeCache.load:")


def test_ranks_that_load_different_saves_raise(tmp_path: Path) -> None:
    _filled().save(tmp_path / "a")
    cache = _filled()
    append(cache, 1)
    cache.save(tmp_path / "b")
    errors = run_ranks(_load_elsewhere, 2, [tmp_path / "a", tmp_path / "b"])
    for error in errors:
        assert error.startswith("ExchangeError:") and "digest of the index" in error


def _load_as(rank: int, world_size: int, directory: Path, kv_dtypes: list[str | None]) -> str:
    with pytest.raises(ExchangeError) as caught:
        hf.TreeCache.load(directory, CONFIG, kv_dtype=kv_dtypes[rank], timeout=10)
    return str(caught.value)


def test_ranks_that_load_different_kv_dtypes_raise(tmp_path: Path) -> None:
    _filled().save(tmp_path)
    for error in run_ranks(_load_as, 2, tmp_path, [None, "int8"]):
        assert "kv_dtype is torch.int8 on rank 1, None on rank 0" in error
