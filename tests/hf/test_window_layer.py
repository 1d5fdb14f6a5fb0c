# SPDX-License-Identifier: BSD-3-Clause
"""Layers with a sliding window keep the slots of the window and a margin, and no more.

The mistakes these tests are for: a slot that the next token sees and that is gone, a row that lies
one place further than the ranges say, memory that stays, a crop that half of the layers follow.
"""

from __future__ import annotations

import copy
import gc
import itertools
import json
import random
import weakref
from pathlib import Path

import pytest
import torch

from distributed import on_ranks, run_ranks
from tiers import tiers

pytest.importorskip("transformers")

from transformers import Gemma3TextConfig

from hf_caches import HEAD_DIM, HEADS, numbered_keys
from hf_models import CONFIGS, make_model, make_prompts
from test_snapshot_damage import edit_index
from tree_attention import BlockCyclic, Contiguous, ContiguousThenCyclic, ShardLayout, hf
from tree_attention.hf.cache.growing import CROP_KEEPS, TreeCacheLayer
from tree_attention.hf.cache.window import MARGIN, STEP, WindowLayer
from tree_attention.reference import quantise

CONFIG = CONFIGS["gemma2"]  # of two layers the first has a window
WINDOW = CONFIG.sliding_window
LENGTH = 700


def _append(cache: hf.TreeCache, count: int) -> None:
    begin = cache.get_seq_length()
    keys = numbered_keys(begin, begin + count, batch=1)
    for layer_idx in range(len(cache)):
        handle, _ = cache.update(keys, -keys, layer_idx)
        _check_rows(handle.layer, max(0, begin + 1 - WINDOW))
        _check_holds(cache.layers[layer_idx])


def _check_rows(layer: TreeCacheLayer, begin: int) -> None:
    """The slots from `begin` on are where the key ranges of the attention look for them."""
    shard = layer.shard
    begin = 0 if layer.window is None else begin
    first, end = (shard.count(slot) - layer.dropped for slot in (begin, layer.length))
    slots = shard.layout.local_slots(shard.rank, begin, layer.length)
    assert first >= 0
    assert torch.equal(
        layer.keys[:, :, first:end], numbered_keys(0, layer.length, batch=1)[:, :, slots]
    )
    assert torch.equal(layer.values[:, :, first:end], -layer.keys[:, :, first:end])


def _check_holds(layer: TreeCacheLayer) -> None:
    _check_rows(layer, layer.first)
    if layer.window is None:
        assert layer.first == 0
        return
    shard, length = layer.shard, layer.length
    assert layer.first == 0 or layer.first + WINDOW <= length
    kept = shard.count(length) - shard.count(max(0, length - WINDOW - MARGIN))
    assert layer.keys.shape[2] <= kept + STEP


def _layouts(world_size: int) -> list[ShardLayout]:
    even = tuple(LENGTH * rank // world_size for rank in range(world_size + 1))
    return [
        BlockCyclic(world_size),
        BlockCyclic(world_size, 1),
        BlockCyclic(world_size, 1000),
        Contiguous((*even[:-1], 10**9)),
        ContiguousThenCyclic((*even[:-1], LENGTH // 2), 4)
        if even[-2] <= LENGTH // 2
        else ContiguousThenCyclic((0,) * world_size + (50,), 4),
    ]


@pytest.mark.parametrize("world_size", [1, 2, 3])
@on_ranks()
def test_chunks_see_their_windows_and_the_rest_is_dropped(rank: int, world_size: int) -> None:
    for layout in _layouts(world_size):
        cache = hf.TreeCache(CONFIG, layout=layout)
        for count in (1, 30, 1, 300, 129, 128, 2, *[1] * 150):
            _append(cache, count)
        cache.reset()
        _append(cache, 20)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@on_ranks()
def test_any_order_of_operations(rank: int, world_size: int) -> None:
    choice = random.Random(17)  # the same on all ranks
    for layout in _layouts(world_size):
        cache, dropped = hf.TreeCache(CONFIG, layout=layout, growth=choice.choice((3, 1024))), 0
        for _ in range(60):
            operation = choice.randrange(6)
            if operation < 4:
                _append(cache, choice.choice((1, 1, 1, 5, 40, 200)))
            elif operation == 4 and cache.layers[0].is_initialized:
                room = cache.get_seq_length() - cache.layers[0].first - WINDOW
                _crop(cache, choice.randrange(max(1, room + 1)))
            elif cache.layers[0].is_initialized:
                cache = copy.deepcopy(cache)
                cache.batch_repeat_interleave(3)
                cache.reorder_cache(torch.tensor([2, 0, 1]))
                cache.batch_select_indices(torch.tensor([1]))
            for layer in cache.layers:
                if layer.is_initialized:
                    _check_rows(layer, layer.first)
            dropped = max(dropped, cache.layers[0].first)
        assert dropped > 0


def _crop(cache: hf.TreeCache, count: int) -> None:
    cache.crop(cache.get_seq_length() - count if CROP_KEEPS else -count)


def test_crop_goes_back_by_the_margin_and_otherwise_not_at_all() -> None:
    """The layers before one that refuses are not cropped either."""
    assert CONFIG.layer_types == ["sliding_attention", "full_attention"]
    config = copy.deepcopy(CONFIG)
    config.layer_types = config.layer_types[::-1]
    cache = hf.TreeCache(config)
    _append(cache, 300)
    message = (
        "crop can remove 128 of these 300 tokens, got {}: layers with a sliding window of 8 have "
        "forgotten the slots before 164; copy.deepcopy the cache where"
    )
    for count in (129, 299, 300):
        with pytest.raises(ValueError, match=message.format(count)):
            _crop(cache, count)
        assert [layer.length for layer in cache.layers] == [300, 300]
    for count, length in ((100, 200), (28, 172)):
        _crop(cache, count)
        assert cache.get_seq_length() == length
    with pytest.raises(ValueError, match="crop can remove 0 of these 172 tokens, got 1: layers"):
        _crop(cache, 1)
    _append(cache, 3)
    _append(cache, 200)
    for layer in cache.layers:
        _check_holds(layer)
    cache.reset()
    _append(cache, WINDOW + MARGIN)
    _crop(cache, WINDOW + MARGIN)
    assert cache.get_seq_length() == 0


def _kept_bytes(
    rank: int, world_size: int, config: Gemma3TextConfig, lengths: list[int]
) -> list[int]:
    """The memory that the tensors hold, asked of the allocations themselves."""
    cache, found = hf.TreeCache(config), []
    for length in lengths:
        count = length - cache.get_seq_length()
        keys = torch.zeros(1, config.num_key_value_heads, count, config.head_dim).bfloat16()
        for layer_idx in range(len(cache)):
            cache.update(keys, keys, layer_idx)
        buffers = [x for layer in cache.layers for x in layer.buffers().values()]
        storages = {x.untyped_storage().data_ptr(): x.untyped_storage() for x in buffers}
        found.append(sum(storage.nbytes() for storage in storages.values()))
        assert found[-1] == cache.num_bytes
    return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_bytes_of_gemma_3_1b(world_size: int) -> None:
    """At 8k tokens at most 30 % of the bytes of layers that keep all keys, on every rank."""
    shape = {"num_hidden_layers": 26, "num_key_value_heads": 1, "head_dim": 256}
    config = Gemma3TextConfig(**shape, sliding_window=512)
    assert config.layer_types.count("sliding_attention") == 22
    whole = Gemma3TextConfig(**shape, layer_types=["full_attention"] * 26)
    # A prompt, one token, and tokens up to the end of a step.
    lengths = [8064, 8065, 8192]
    kept = run_ranks(_kept_bytes, world_size, config, lengths)
    alls = run_ranks(_kept_bytes, world_size, whole, lengths)
    slot_bytes = 2 * 256 * 2
    for own, everything in zip(kept, alls, strict=True):
        assert everything[-1] == 26 * 8192 // world_size * slot_bytes
        assert all(a <= 0.3 * b for a, b in zip(own, everything, strict=True))
        # docs/cache.md
        window_slots = (512 + MARGIN) // world_size + STEP
        assert own[-1] <= (4 * 8192 // world_size + 22 * window_slots) * slot_bytes


def test_what_a_chunk_sees_is_freed_with_it() -> None:
    """At once, and not when the garbage collector finds a cycle."""
    cache = hf.TreeCache(CONFIG)
    keys = numbered_keys(0, 600, batch=1)
    gc.disable()
    try:
        handle, _ = cache.update(keys, -keys, 0)
        assert handle.layer.keys.shape[2] >= 600
        seen = weakref.ref(handle.layer.keys)
        del handle, _
        assert seen() is None
    finally:
        gc.enable()


def test_growing_is_rare() -> None:
    """The window moves to new buffers once in `STEP` tokens."""
    cache, addresses = hf.TreeCache(CONFIG), []
    _append(cache, 400)
    for _ in range(4 * STEP):
        _append(cache, 1)
        addresses.append(cache.layers[0].keys.data_ptr())
        assert isinstance(cache.layers[0], WindowLayer)
    moves = sum(a != b for a, b in itertools.pairwise(addresses))
    assert moves <= 4


def _save(rank: int, world_size: int, layout: ShardLayout, directory: Path) -> None:
    cache = hf.TreeCache(CONFIG, layout=layout)
    _append(cache, LENGTH)
    _crop(cache, 5)
    cache.save(directory)


def _check_load(
    rank: int, world_size: int, layout: ShardLayout, directory: Path, kv_dtype: str | None
) -> None:
    cache = hf.TreeCache.load(directory, CONFIG, layout=layout, kv_dtype=kv_dtype)
    first = LENGTH - WINDOW - MARGIN
    assert [layer.first for layer in cache.layers] == [first, 0]
    if kv_dtype is not None:
        layer = cache.layers[0]
        slots = layout.local_slots(rank, first, LENGTH - 5)
        expected, scale = quantise(numbered_keys(0, LENGTH, batch=1)[:, :, slots], layer.keys.dtype)
        held = layer.held()
        assert torch.equal(layer.keys[:, :, held].float(), expected.float())
        assert torch.equal(layer.k_scale[:, :, held], scale)
        return
    for target in _layouts(world_size):
        for layer in cache.layers:
            _check_holds(layer)
        cache.reshard(target)
    _append(cache, 1)
    _append(cache, 400)
    with pytest.raises(ValueError, match="crop can remove 128 of these"):
        _crop(cache, 129)


@pytest.mark.parametrize("saved_by", tiers([3], [1]))
def test_kept_slots_are_saved_loaded_and_moved(saved_by: int, tmp_path: Path) -> None:
    for number, layout in enumerate(_layouts(saved_by)):
        directory = tmp_path / str(number)
        run_ranks(_save, saved_by, layout, directory)
        slots = sum(file.stat().st_size for file in directory.glob("*.safetensors")) / (
            2 * HEADS * HEAD_DIM * 4
        )
        assert slots <= LENGTH + WINDOW + MARGIN + 100  # headers
        for world_size in (1, 2):
            for target in _layouts(world_size):
                for kv_dtype in (None, "int8"):
                    run_ranks(_check_load, world_size, target, directory, kv_dtype)


@pytest.mark.parametrize("first_slots", [[LENGTH - 5, 0], [0, 1], [-1, 0], [0]])
def test_an_index_without_what_a_window_shows_is_damaged(
    first_slots: list[int], tmp_path: Path
) -> None:
    _save(0, 1, BlockCyclic(1), tmp_path)
    index = json.loads((tmp_path / "index.json").read_text())
    assert index["first_slots"] == [LENGTH - WINDOW - MARGIN, 0]
    edit_index(first_slots=first_slots)(tmp_path)
    with pytest.raises(ValueError, match=r"is damaged: first_slots of the layers must be slots up"):
        hf.TreeCache.load(tmp_path, CONFIG)


@torch.no_grad()
def test_a_mask_of_a_longer_window_is_refused() -> None:
    """Its queries would miss keys without a word."""
    model = make_model("gemma2", "tree_attention")
    shorter = copy.deepcopy(CONFIG)
    shorter.sliding_window = WINDOW - 1
    with pytest.raises(
        NotImplementedError, match=r"keeps the keys of a sliding window of 7, .* the window 8"
    ):
        model(make_prompts(1)["input_ids"], past_key_values=hf.TreeCache(shorter))
