# SPDX-License-Identifier: BSD-3-Clause
"""What caches with sliding windows save, load and move: the slots of the window and a margin."""

import json
from itertools import product
from pathlib import Path

import pytest
import torch

from distributed import run_ranks

pytest.importorskip("transformers")

from hf_caches import HEAD_DIM, HEADS, numbered_keys
from pairwise import each_pair
from test_snapshot_damage import edit_index
from tree_attention import BlockCyclic, ShardLayout, hf
from tree_attention.hf.cache.window import MARGIN
from tree_attention.reference import quantise
from window_caches import (
    CONFIG,
    LENGTH,
    MAX_LENGTH,
    WINDOW,
    append,
    check_holds,
    crop,
    layouts,
)


def _save(
    rank: int,
    world_size: int,
    layout: ShardLayout,
    directory: Path,
    max_length: int | None = None,
) -> None:
    cache = hf.TreeCache(CONFIG, layout=layout, max_length=max_length)
    append(cache, LENGTH)
    crop(cache, 5)
    cache.save(directory)


def _check_load(
    rank: int,
    world_size: int,
    layout: ShardLayout,
    directory: Path,
    kv_dtype: str | None,
    max_length: int | None,
) -> None:
    cache = hf.TreeCache.load(
        directory, CONFIG, layout=layout, kv_dtype=kv_dtype, max_length=max_length
    )
    first = LENGTH - WINDOW - MARGIN
    assert [layer.first for layer in cache.layers] == [first, 0]
    if kv_dtype is not None:
        layer = cache.layers[0]
        slots = layout.local_slots(rank, first, LENGTH - 5)
        expected, scale = quantise(
            numbered_keys(0, LENGTH, batch=1)[:, :, slots], layer.key_rows.dtype
        )
        held = layer.held()
        assert torch.equal(layer.key_rows[:, :, held].float(), expected.float())
        assert torch.equal(layer.k_scale[:, :, held], scale)
        return
    for target in layouts(world_size):
        for layer in cache.layers:
            check_holds(layer)
        cache.reshard(target)
    append(cache, 1)
    append(cache, 400)
    with pytest.raises(ValueError, match="crop can remove 128 of these"):
        crop(cache, 129)


@pytest.mark.deep
@pytest.mark.parametrize("saved_by", [3, 1])
def test_kept_slots_are_saved_loaded_and_moved(saved_by: int, tmp_path: Path) -> None:
    numbers = range(len(layouts(saved_by)))
    for number, max_length in product(numbers, (None, MAX_LENGTH)):
        directory = tmp_path / f"{number} {max_length}"
        run_ranks(_save, saved_by, layouts(saved_by)[number], directory, max_length)
        slots = sum(file.stat().st_size for file in directory.glob("*.safetensors")) / (
            2 * HEADS * HEAD_DIM * 4
        )
        assert slots <= LENGTH + WINDOW + MARGIN + 100  # headers
    kinds = ((None, None), (None, MAX_LENGTH), ("int8", MAX_LENGTH))
    loads = each_pair(product(numbers, (None, MAX_LENGTH), numbers, kinds, (1, 2)))
    for number, max_length, target, kind, world_size in loads:
        directory = tmp_path / f"{number} {max_length}"
        run_ranks(_check_load, world_size, layouts(world_size)[target], directory, *kind)


@pytest.mark.parametrize("first_slots", [[LENGTH - 5, 0], [0, 1], [-1, 0], [0]])
def test_an_index_without_what_a_window_shows_is_refused(
    first_slots: list[int], tmp_path: Path
) -> None:
    _save(0, 1, BlockCyclic(1), tmp_path)
    index = json.loads((tmp_path / "index.json").read_text())
    assert index["first_slots"] == [LENGTH - WINDOW - MARGIN, 0]
    edit_index(first_slots=first_slots)(tmp_path)
    with pytest.raises(ValueError, match=r"lacks slots that the cache needs, .* slots up to"):
        hf.TreeCache.load(tmp_path, CONFIG)


def test_a_deterministic_cache_needs_all_slots(tmp_path: Path) -> None:
    _save(0, 1, BlockCyclic(1), tmp_path)
    with pytest.raises(ValueError, match=r"with deterministic all: .* up to \[0, 0\], got \[5"):
        hf.TreeCache.load(tmp_path, CONFIG, max_length=MAX_LENGTH, deterministic=64)
