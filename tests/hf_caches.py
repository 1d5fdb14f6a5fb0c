# SPDX-License-Identifier: BSD-3-Clause
"""Caches of the models of `hf_models` with keys that say which they are."""

from __future__ import annotations

import torch
from torch import Tensor

from tree_attention import ShardLayout, hf

HEADS, HEAD_DIM = 2, 8  # of the models' keys and values


def numbered_keys(begin: int, end: int, batch: int = 2) -> Tensor:
    """Row, head and global slot, the same in every column."""
    rows = torch.arange(batch).view(-1, 1, 1, 1) * 10_000
    heads = torch.arange(HEADS).view(1, -1, 1, 1) * 100_000
    slots = torch.arange(begin, end).view(1, 1, -1, 1)
    keys = (rows + heads + slots).float()
    return keys.expand(batch, HEADS, end - begin, HEAD_DIM).contiguous()


def append(cache: hf.TreeCache, count: int) -> None:
    """The next numbered keys of two sequences, other ones in each layer, and values."""
    begin = cache.get_seq_length()
    keys = numbered_keys(begin, begin + count)
    for layer_idx in range(len(cache)):
        cache.update(keys + layer_idx, -keys, layer_idx)


def check_holds(cache: hf.TreeCache, length: int, layout: ShardLayout | None = None) -> None:
    """What `append` gave it, where the layout says; None: the cache's own."""
    layout = cache.shard.layout if layout is None else layout
    slots = layout.local_slots(cache.shard.rank, 0, length)
    expected = numbered_keys(0, length)[:, :, slots]
    assert cache.get_seq_length() == length
    for layer_idx, layer in enumerate(cache.layers):
        assert layer.shard.layout == cache.shard.layout == layout
        assert torch.equal(layer.key_rows[:, :, : len(slots)], expected + layer_idx)
        assert torch.equal(layer.value_rows[:, :, : len(slots)], -expected)
