# SPDX-License-Identifier: BSD-3-Clause
"""Layers with a sliding window keep the slots of the window and a margin, and no more.

The mistakes these tests are for: a slot that the next token sees and that is gone, a row that lies
one place further than the pages say, memory that stays, a crop that half of the layers follow.
"""

from __future__ import annotations

import copy
import gc
import random
import weakref
from pathlib import Path
from unittest import mock

import pytest
import torch

from distributed import on_ranks, run_ranks
from tiers import by_world, tiers

pytest.importorskip("transformers")

from transformers import Gemma3TextConfig

from hf_caches import numbered_keys
from hf_models import make_model, make_prompts
from tree_attention import BlockCyclic, hf
from tree_attention.hf import CACHE_NAME
from tree_attention.hf.cache.growing import TreeCacheLayer
from tree_attention.hf.cache.window import MARGIN, STEP, WindowLayer
from window_caches import (
    CONFIG,
    MAX_LENGTH,
    WINDOW,
    append,
    check_holds,
    crop,
    crop_to,
    fixed_or_not,
    layouts,
)


@fixed_or_not
@by_world([], [2, 1, 3, 4])
@on_ranks()
def test_chunks_see_their_windows_and_the_rest_is_dropped(
    rank: int, world_size: int, max_length: int | None
) -> None:
    for layout in layouts(world_size):
        cache = hf.TreeCache(CONFIG, layout=layout, max_length=max_length)
        for count in (1, 30, 1, 300, 129, 128, 2, *[1] * 150):
            append(cache, count)
        cache.reset()
        append(cache, 20)


@pytest.mark.parametrize("max_length", tiers([None], [MAX_LENGTH]))
@by_world([2], [1, 3, 4])
@on_ranks()
def test_any_order_of_operations(rank: int, world_size: int, max_length: int | None) -> None:
    choice = random.Random(17)  # the same on all ranks
    for layout in layouts(world_size):
        growth, dropped = choice.choice((3, 1024)), 0
        cache = hf.TreeCache(CONFIG, layout=layout, growth=growth, max_length=max_length)
        for _ in range(60):
            operation = choice.randrange(6)
            if operation < 4:
                append(cache, choice.choice((1, 1, 1, 5, 40, 200)))
            elif operation == 4 and cache.layers[0].is_initialized:
                room = int(cache.get_seq_length()) - cache.layers[0].first - WINDOW
                crop(cache, choice.randrange(max(1, room + 1)))
            elif cache.layers[0].is_initialized:
                cache = copy.deepcopy(cache)
                cache.batch_repeat_interleave(3)
                cache.reorder_cache(torch.tensor([2, 0, 1]))
                cache.batch_select_indices(torch.tensor([1]))
            for layer in cache.layers:
                if layer.is_initialized:
                    check_holds(layer)
            dropped = max(dropped, cache.layers[0].first)
        assert dropped > 0


@fixed_or_not
@by_world([2], [1, 3])
@on_ranks()
def test_rows_in_another_order_stay_so_after_crop(
    rank: int, world_size: int, max_length: int | None
) -> None:
    """A layer that keeps what a long pass saw fills its ring with it again."""
    choice, generator = random.Random(5), torch.Generator().manual_seed(5)  # the same on all ranks
    cache = hf.TreeCache(CONFIG, layout=BlockCyclic(world_size, 4), max_length=max_length)
    ring, *_ = cache.layers
    ring.keeps_last_pass = True
    expected, refilled = torch.empty(2, 2, 0, 8), 0
    for _ in range(60):
        keys = torch.randn(2, 2, choice.choice((1, 10, 200)), 8, generator=generator)
        for layer_idx in range(len(cache)):
            cache.update(keys, -keys, layer_idx)
        expected = torch.cat((expected, keys), 2)
        for operation in choice.sample(("reorder", "crop"), 2):
            if operation == "reorder":
                rows = choice.choice(([1, 0], [0, 0], [1, 1]))
                cache.reorder_cache(torch.tensor(rows))
                expected = expected[rows]
            elif expected.shape[2] >= max(200, ring.shortest + 10):
                refilled += ring._last_pass is not None
                crop(cache, 10)
                expected = expected[:, :, :-10]
            slots = cache.shard.layout.local_slots(rank, ring.first, expected.shape[2])
            assert torch.equal(ring.key_rows[:, :, ring.held()], expected[:, :, slots])
            assert torch.equal(ring.value_rows[:, :, ring.held()], -expected[:, :, slots])
    assert ring.first > 0 and refilled > 0


@fixed_or_not
def test_crop_goes_back_by_the_margin_and_otherwise_not_at_all(max_length: int | None) -> None:
    """The layers before one that refuses are not cropped either."""
    assert CONFIG.layer_types == ["sliding_attention", "full_attention"]
    config = copy.deepcopy(CONFIG)
    config.layer_types = config.layer_types[::-1]
    cache = hf.TreeCache(config, max_length=max_length)
    append(cache, 300)
    message = (
        "crop can remove 128 of these 300 tokens, got {}: layers with a sliding window of 8 have "
        "forgotten the slots before 164; copy.deepcopy the cache where"
    )
    for count in (129, 299, 300):
        with pytest.raises(ValueError, match=message.format(count)):
            crop(cache, count)
        assert [layer.length for layer in cache.layers] == [300, 300]
    for count, length in ((100, 200), (28, 172)):
        crop(cache, count)
        assert cache.get_seq_length() == length
    with pytest.raises(ValueError, match="crop can remove 0 of these 172 tokens, got 1: layers"):
        crop(cache, 1)
    append(cache, 3)
    append(cache, 200)
    for layer in cache.layers:
        check_holds(layer)
    cache.reset()
    append(cache, WINDOW + MARGIN)
    crop(cache, WINDOW + MARGIN)
    assert cache.get_seq_length() == 0


@fixed_or_not
@pytest.mark.parametrize("count", [3, 200])
def test_what_an_interrupted_pass_has_overwritten_is_gone(
    count: int, max_length: int | None
) -> None:
    """After a short one `crop` goes back by fewer tokens, after a long one not at all."""
    cache = hf.TreeCache(CONFIG, max_length=max_length)
    append(cache, 300)
    keys = numbered_keys(300, 300 + count, batch=1)
    cache.update(keys, -keys, 0)
    with pytest.raises(RuntimeError, match="did not reach the last layer"):
        cache.update(keys, -keys, 0)
    with pytest.raises(ValueError, match="have forgotten the slots before"):
        crop_to(cache, 300 if count > MARGIN else 300 - MARGIN + count - 1)
    if count > MARGIN:
        cache.reset()
        append(cache, 30)
    else:
        crop_to(cache, 300 - MARGIN + count)
        for layer in cache.layers:
            check_holds(layer)
        append(cache, 300)


@pytest.mark.parametrize("count", [3, 130, 200])
@on_ranks(2)
def test_inside_a_pass_nothing_is_saved_or_moved(
    rank: int, world_size: int, count: int, tmp_path: Path
) -> None:
    """Also where layers share their length, which then says nothing; the save before stays."""
    cache = hf.TreeCache(CONFIG, max_length=600)
    append(cache, 300)
    cache.save(tmp_path)
    keys, shard = numbered_keys(300, 300 + count, batch=1), cache.shard
    cache.update(keys, -keys, 0)
    for call in (lambda: cache.save(tmp_path), lambda: cache.reshard(BlockCyclic(2, 8))):
        with pytest.raises(ValueError, match="a forward pass has not reached the last layer"):
            call()
    assert cache.shard is shard
    loaded = hf.TreeCache.load(tmp_path, CONFIG)
    assert loaded.get_seq_length() == 300
    for layer in loaded.layers:
        check_holds(layer)


def test_a_fill_that_was_interrupted_is_not_gone_on_with(tmp_path: Path) -> None:
    """In the first layer, of which the length is then still that of the last one."""
    cache = hf.TreeCache(CONFIG)
    append(cache, 300)
    keys = numbered_keys(300, 500, batch=1)
    places, calls = WindowLayer.places, []

    def interrupted(layer: WindowLayer, slots: torch.Tensor) -> torch.Tensor:
        calls.append(layer)
        if len(calls) == 5:  # of keys, in the ring and what the pass saw, then of values
            raise KeyboardInterrupt
        return places(layer, slots)

    with mock.patch.object(WindowLayer, "places", interrupted), pytest.raises(KeyboardInterrupt):
        cache.update(keys, -keys, 0)
    with pytest.raises(RuntimeError, match="did not reach the last layer"):
        cache.update(keys, -keys, 0)
    with pytest.raises(ValueError, match=r"save: a forward pass has not reached the last layer"):
        cache.save(tmp_path)
    with pytest.raises(ValueError, match="have forgotten the slots before 500"):
        crop_to(cache, 300)


def test_a_pass_that_filled_the_window_and_is_not_counted_is_not_gone_on_with() -> None:
    """The ring holds the last of the new tokens, and the next query sees some before these."""
    cache = hf.TreeCache(CONFIG)
    append(cache, 300)
    keys = numbered_keys(300, 300 + MARGIN + WINDOW, batch=1)
    with mock.patch.object(TreeCacheLayer, "end", _interrupt), pytest.raises(KeyboardInterrupt):
        cache.update(keys, -keys, 0)
    assert cache.layers[0].first <= cache.layers[0].length == 300
    with pytest.raises(RuntimeError, match="did not reach the last layer"):
        cache.update(keys[:, :, :1], -keys[:, :, :1], 0)
    cache.reset()
    append(cache, 300)


@fixed_or_not
def test_a_crop_that_was_interrupted_is_not_gone_on_with(
    max_length: int | None, tmp_path: Path
) -> None:
    """It fills the ring with what a long pass saw, up to fewer tokens than there still are."""
    cache = hf.TreeCache(CONFIG, max_length=max_length)
    for layer in cache.layers:
        layer.keeps_last_pass = True
    append(cache, 300)
    append(cache, 200)
    with mock.patch.object(TreeCacheLayer, "cut", _interrupt), pytest.raises(KeyboardInterrupt):
        crop(cache, 150)
    assert [layer.length for layer in cache.layers] == [500, 500]
    keys = numbered_keys(500, 501, batch=1)
    with pytest.raises(RuntimeError, match="did not reach the last layer"):
        cache.update(keys, -keys, 0)
    with pytest.raises(ValueError, match=r"save: a forward pass has not reached the last layer"):
        cache.save(tmp_path)
    with pytest.raises(ValueError, match="have forgotten the slots before"):
        crop(cache, 150)
    cache.reset()
    append(cache, 300)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _kept_bytes(
    rank: int,
    world_size: int,
    config: Gemma3TextConfig,
    lengths: list[int],
    max_length: int | None = None,
) -> list[int]:
    """The memory that the tensors hold, asked of the allocations themselves."""
    cache, found = hf.TreeCache(config, max_length=max_length), []
    for length in lengths:
        count = length - int(cache.get_seq_length())
        keys = torch.zeros(1, config.num_key_value_heads, count, config.head_dim).bfloat16()
        for layer_idx in range(len(cache)):
            cache.update(keys, keys, layer_idx)
        buffers = [x for layer in cache.layers for x in layer.buffers().values()]
        storages = {x.untyped_storage().data_ptr(): x.untyped_storage() for x in buffers}
        found.append(sum(storage.nbytes() for storage in storages.values()))
        assert found[-1] == cache.num_bytes
    return found


@pytest.mark.deep
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
        # docs/cache_layers.md
        window_slots = (512 + MARGIN) // world_size + STEP
        assert own[-1] <= (4 * 8192 // world_size + 22 * window_slots) * slot_bytes


@pytest.mark.parametrize("world_size", [1, 2])
def test_bytes_of_a_small_gemma_3_of_fixed_size(world_size: int) -> None:
    """At 2,000 of 2,048 tokens: rings of 704 slots beside one layer that holds all."""
    shape = {"num_hidden_layers": 6, "num_key_value_heads": 1, "head_dim": 64}
    config = Gemma3TextConfig(**shape, sliding_window=512)
    assert config.layer_types.count("sliding_attention") == 5
    ring, slot_bytes = (512 + MARGIN) // world_size + STEP, 2 * 64 * 2
    for (found,) in run_ranks(_kept_bytes, world_size, config, [2000], 2048):
        assert found == (2048 // world_size + 5 * ring) * slot_bytes
        assert found < 0.5 * 6 * 2048 // world_size * slot_bytes


@fixed_or_not
def test_what_a_chunk_sees_is_freed_with_it(max_length: int | None) -> None:
    """At once, and not when the garbage collector finds a cycle."""
    cache = hf.TreeCache(CONFIG, max_length=max_length)
    keys = numbered_keys(0, 600, batch=1)
    gc.disable()
    try:
        handle, _ = cache.update(keys, -keys, 0)
        assert handle.layer.key_rows.shape[2] >= 600
        seen = weakref.ref(handle.layer.key_rows)
        del handle, _
        assert seen() is None
    finally:
        gc.enable()


def test_a_ring_stays_where_it_is() -> None:
    """It grows up to its size, once in `STEP` tokens, and no further."""
    cache, addresses = hf.TreeCache(CONFIG), []
    for _ in range(2 * (WINDOW + MARGIN + STEP)):
        append(cache, 1)
        addresses.append(cache.layers[0].key_rows.data_ptr())
    assert isinstance(cache.layers[0], WindowLayer)
    assert len({*addresses}) <= (WINDOW + MARGIN) // STEP + 2
    last = addresses[-1]
    append(cache, 400)
    assert cache.layers[0].key_rows.data_ptr() == last == addresses[WINDOW + MARGIN + STEP]


@torch.no_grad()
def test_a_mask_of_a_longer_window_is_refused() -> None:
    """Its queries would miss keys without a word."""
    model = make_model("gemma2", "tree_attention")
    shorter = copy.deepcopy(CONFIG)
    shorter.sliding_window = WINDOW - 1
    with pytest.raises(
        NotImplementedError, match=r"keeps the keys of a sliding window of 7, .* the window 8"
    ):
        model(make_prompts(1)["input_ids"], **{CACHE_NAME: hf.TreeCache(shorter)})


@torch.no_grad()
def _split_and_taken_back(rank: int, world_size: int, wanted: torch.Tensor) -> None:
    model = hf.enable(make_model("mistral_window"), prefill="split")
    ids = make_prompts(batch=1, length=60)["input_ids"]
    kept = hf.TreeCache(model.config)
    for part in (ids[:, :30], ids[:, 30:]):
        model(part, **{CACHE_NAME: kept}, logits_to_keep=1)
    kept.crop(-45)
    found = model(ids[:, 15:40], **{CACHE_NAME: kept}, logits_to_keep=1).logits
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-3)


@torch.no_grad()
def test_short_passes_that_are_split_can_be_taken_back() -> None:
    """All of them, as long as the layers would have kept their slots if nobody had split them."""
    ids = make_prompts(batch=1, length=60)["input_ids"]
    wanted = make_model("mistral_window")(ids[:, :40], logits_to_keep=1).logits
    run_ranks(_split_and_taken_back, 2, wanted)
