# SPDX-License-Identifier: BSD-3-Clause
"""Caches with a layer of a sliding window, whose rows are numbered."""

import pytest
import torch

from hf_caches import numbered_keys
from hf_models import CONFIGS
from tree_attention import BlockCyclic, Contiguous, ContiguousThenCyclic, ShardLayout, hf
from tree_attention.hf.cache.growing import CROP_KEEPS, TreeCacheLayer
from tree_attention.hf.cache.window import MARGIN, STEP
from tree_attention.hf.masks import KeyRanges

CONFIG = CONFIGS["gemma2"]  # of two layers the first has a window
WINDOW = CONFIG.sliding_window
LENGTH = 700
MAX_LENGTH = 30_000

fixed_or_not = pytest.mark.parametrize("max_length", [None, MAX_LENGTH])


def append(cache: hf.TreeCache, count: int) -> None:
    begin = int(cache.get_seq_length())
    keys = numbered_keys(begin, begin + count, batch=1)
    for layer_idx in range(len(cache)):
        handle, _ = cache.update(keys, -keys, layer_idx)
        check_rows(handle.layer, max(0, begin + 1 - WINDOW), begin + count)
    # What the margin keeps is looked at less often: most tests append many single tokens.
    if count > 1 or begin % 7 == 0:
        for layer in cache.layers:
            check_holds(layer)


def check_rows(layer: TreeCacheLayer, begin: int, length: int) -> None:
    """The slots from `begin` on are where the attention looks for them."""
    shard = layer.shard
    begin = 0 if layer.window is None else begin
    slots = shard.layout.local_slots(shard.rank, begin, length)
    ranges = KeyRanges(torch.tensor([[[begin, length]]]), length)
    keys, values, _ = layer.operands(layer.buffers())
    if layer.page_size:
        found, table = ranges.in_ring(shard.layout, shard.rank, layer.key_rows, layer.page_size)
        keys, values = (x[table[0]].transpose(0, 1).flatten(1, 2)[None] for x in (keys, values))
    else:
        found = ranges.local(shard.layout, shard.rank, layer.dropped)
    first, end = found.flatten().tolist()
    assert first >= 0
    expected = numbered_keys(0, length, batch=1)[:, :, slots]
    assert torch.equal(keys[:, :, first:end], expected)
    assert torch.equal(values[:, :, first:end], -expected)


def check_holds(layer: TreeCacheLayer) -> None:
    check_rows(layer, layer.first, layer.length)
    if layer.window is None:
        assert layer.first == 0
        return
    shard, length = layer.shard, layer.length
    assert layer.first == 0 or layer.first + WINDOW <= length
    # Of slots that may begin inside a page, and of whole pages.
    assert layer.key_rows.shape[2] < shard.most(WINDOW + MARGIN) + 2 * STEP


def layouts(world_size: int) -> list[ShardLayout]:
    even = tuple(LENGTH * rank // world_size for rank in range(world_size + 1))
    return [
        BlockCyclic(world_size),
        BlockCyclic(world_size, 1),
        BlockCyclic(world_size, 1000),
        BlockCyclic(world_size, 5, (*range(1, world_size), 2 * world_size)),
        Contiguous((*even[:-1], 10**9)),
        ContiguousThenCyclic((*even[:-1], LENGTH // 2), 4)
        if even[-2] <= LENGTH // 2
        else ContiguousThenCyclic((0,) * world_size + (50,), 4),
    ]


def crop_to(cache: hf.TreeCache, length: int) -> None:
    held = min(layer.length for layer in cache.layers)
    cache.crop(length if CROP_KEEPS else length - held)


def crop(cache: hf.TreeCache, count: int) -> None:
    cache.crop(int(cache.get_seq_length()) - count if CROP_KEEPS else -count)
