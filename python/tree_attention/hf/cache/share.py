# SPDX-License-Identifier: BSD-3-Clause
"""Rows that begin with all tokens of one sequence, which are stored once.

Layers that keep all keys share the memory of the sequence: each rank's local slots of the document,
which the rows only read. The tokens after it are each row's own, in buffers that begin inside the
block of the layout where the document ends, so that the arithmetic of the layout holds for them.
Layers with a window or a state copy what they keep, which is small. All layers of a model that
chooses its keys by an index copy theirs, as rows of one choice must be in one buffer.
"""

import copy
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from .growing import KVShard, TreeCacheLayer
from .prefix import Prefix
from .shard import Shard
from .window import WindowLayer


def shared_rows(layer: Any, batch: int, is_chosen_from: bool) -> Any:
    """A layer of `batch` rows, each of which begins with all tokens of `layer`, which has one row.
    `is_chosen_from`: an index of the model chooses among its keys, so that each row has a copy."""
    has_prefix = isinstance(layer, TreeCacheLayer) and not isinstance(layer, WindowLayer)
    if has_prefix and not is_chosen_from:
        return _after_prefix(layer, batch)
    new = copy.deepcopy(layer)
    new.reorder_cache(torch.zeros(batch, dtype=torch.int64, device=new.device))
    return new


def _after_prefix(layer: TreeCacheLayer, batch: int) -> TreeCacheLayer:
    new = copy.copy(layer)
    new.handle, new._shown = KVShard(new), {}
    count = layer.shard.count(layer.length)
    document = {name: x[:, :, :count] for name, x in layer.buffers().items()}
    new.prefix, new.reserved = Prefix(layer.length, document), 0
    layer.lent = max(layer.lent, layer.length)

    def without_slots(x: Tensor) -> Tensor:
        return x.new_empty((batch, x.shape[1], 0, *x.shape[3:]))

    with torch.inference_mode(False):  # see _reallocate
        empty = {name: without_slots(x) for name, x in layer.buffers().items()}
    new.hold(empty, _first_of_own(layer.shard, layer.length))
    return new


def _first_of_own(shard: Shard, length: int) -> int:
    """The local slot with which buffers of the tokens after `length` begin: the first of a block,
    where the layout has blocks."""
    count, block = shard.count(length), 1
    with suppress(ValueError):  # a layout without is for models that need none
        _, block, _ = shard.layout.key_layout(shard.rank)
    return count - count % block
