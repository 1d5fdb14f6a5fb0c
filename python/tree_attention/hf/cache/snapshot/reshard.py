# SPDX-License-Identifier: BSD-3-Clause
"""Moving the slots of a `TreeCache` between the ranks of its group."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ....exchange import Signature, on_every_rank
from ....sharding import ShardLayout
from ..shard import Moves, Shard
from .index import layers_of

if TYPE_CHECKING:
    from ..tree_cache import TreeCache


def reshard(cache: TreeCache, layout: ShardLayout) -> None:
    """`TreeCache.reshard`."""
    old = cache.shard

    def check() -> tuple[Signature, tuple[Shard, int]]:
        length = cache.common_length("reshard")
        new = Shard(old.comm, layout, old.strategy, old.timeout, old.deterministic)
        new.column = old.column
        new.check_holds(cache.max_length or length)
        return (
            ("length", length),
            ("layout of the cache", old.layout),
            ("layout", layout),
            ("layers", layers_of(cache)),
            ("first slots of the layers", [layer.first for layer in cache.kv_layers]),
        ), (new, length)

    (new, length), _ = on_every_rank("TreeCache.reshard", old.comm, old.timeout, check)
    cache.shard = new
    firsts = {layer.first for layer in cache.kv_layers if old.world_size > 1}
    # Tensors made in inference mode could not be written to outside of it.
    with torch.inference_mode(False), torch.no_grad():
        for first in sorted(firsts):
            _move(cache, old, first, length)
    for layer in cache.kv_layers:
        layer.shard = new


def _move(cache: TreeCache, old: Shard, first: int, length: int) -> None:
    """Gives the slots of [first, length) to the layers that begin there."""
    new, count = cache.shard, length - first
    moves = Moves(old, (old.layout, first), (new.layout, first), count)
    dropped = new.count(first)
    places = (("slots", (first, length)), ("layouts", (old.layout, new.layout)))
    for layer in cache.kv_layers:
        if layer.first != first or not layer.is_initialized:
            continue
        held, moved = layer.held(), {}
        for name, x in layer.buffers().items():
            kind = (("dtype", x.dtype), ("shape", (*x.shape[:2], *x.shape[3:])))
            moved[name] = moves.apply("reshard", (*places, *kind), x[:, :, held])
        layer.first, layer.shard = first, new  # for which it makes its buffers
        layer.hold(moved, dropped)
        layer.grow(new.count(length))
