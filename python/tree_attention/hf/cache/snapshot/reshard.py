# SPDX-License-Identifier: BSD-3-Clause
"""Moving the slots of a `TreeCache` between the ranks of its group."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ....exchange import Signature, on_every_rank
from ....sharding import ShardLayout
from ..shard import Shard
from .index import layers_of

if TYPE_CHECKING:
    from ..growing import TreeCacheLayer
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
    for layer in cache.kv_layers:
        layer.shard = new  # for which it makes its buffers
    if old.world_size > 1:
        moves = {
            first: _Moves(old, new, first, length)
            for first in {layer.first for layer in cache.kv_layers}
        }
        # Tensors made in inference mode could not be written to outside of it.
        with torch.inference_mode(False), torch.no_grad():
            for layer in cache.kv_layers:
                if layer.is_initialized:
                    moves[layer.first].apply(layer)


class _Moves:
    """The slots of [first, length) that go to each rank, and the places of those that arrive."""

    def __init__(self, old: Shard, new: Shard, first: int, length: int) -> None:
        self._old, self._held = old, (old.count(first), old.count(length))
        self._dropped, self._count = new.count(first), new.count(length)
        kept = old.layout.local_slots(old.rank, first, length)
        wanted = new.layout.local_slots(new.rank, first, length)
        receivers, senders = new.layout.owner(kept), old.layout.owner(wanted)
        ranks = range(old.world_size)
        # Both ends go through a pair's slots in increasing order, so their messages fit.
        self._outgoing = {r: (receivers == r).nonzero()[:, 0] for r in ranks}
        self._incoming = {r: (senders == r).nonzero()[:, 0] for r in ranks}
        self._signature: Signature = (
            ("slots", (first, length)),
            ("layouts", (old.layout, new.layout)),
        )

    def apply(self, layer: TreeCacheLayer) -> None:
        """Collective: gives a layer the slots of its new place."""
        held = slice(*(count - layer.dropped for count in self._held))
        capacity = layer.capacity(self._count) - self._dropped
        moved = {name: self._moved(x[:, :, held], capacity) for name, x in layer.buffers().items()}
        layer.hold(moved, self._dropped)

    def _moved(self, x: Tensor, capacity: int) -> Tensor:
        batch, num_heads_kv, _, *width = x.shape
        sent = {r: x.index_select(2, rows.to(x.device)) for r, rows in self._outgoing.items()}
        received = {
            r: x.new_empty((batch, num_heads_kv, len(rows), *width))
            for r, rows in self._incoming.items()
        }
        kind = (("dtype", x.dtype), ("shape", (batch, num_heads_kv, *width)))
        self._old.exchange("reshard", (*self._signature, *kind), received, sent, x.device)
        moved = x.new_empty((batch, num_heads_kv, capacity, *width))
        for r, rows in self._incoming.items():
            moved[:, :, rows.to(x.device)] = received[r]
        return moved
