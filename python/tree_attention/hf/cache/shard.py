# SPDX-License-Identifier: BSD-3-Clause
"""One rank's place among the ranks that share a cache."""

import functools
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ...decode import tree_decode
from ...deterministic import UNCUT, Blocks, check_layout, tree_decode_by_blocks
from ...exchange import (
    DEFAULT_TIMEOUT,
    Communicator,
    GivenStrategy,
    Signature,
    check_options,
    get_communicator,
)
from ...sharding import BlockCyclic, Contiguous, ShardLayout
from ...weights.mesh import column_of

Place = tuple[ShardLayout, int]  # of a run of tokens: the first is in this slot of the layout


class Shard:
    """This rank's place in the layout and its communicator; one object for all layers."""

    def __init__(
        self,
        group: ProcessGroup | Communicator | None = None,
        layout: ShardLayout | None = None,
        strategy: GivenStrategy = "auto",
        timeout: float | timedelta = DEFAULT_TIMEOUT,
        blocks: Blocks = UNCUT,
    ) -> None:
        self.blocks = blocks
        self.comm = get_communicator(group)
        self.rank, self.world_size = self.comm.rank, self.comm.world_size
        self.column = column_of(group)  # of the heads that are on this rank
        if layout is None:
            layout = blocks.layout(self.world_size)
        if not isinstance(layout, ShardLayout):
            raise TypeError(
                f"TreeCache: layout must be a ShardLayout, such as BlockCyclic, got {layout!r}"
            )
        self.layout = layout
        if self.layout.world_size != self.world_size:
            raise ValueError(
                f"TreeCache: layout must have the group's world size {self.world_size}, "
                f"got one of {self.layout.world_size}"
            )
        if blocks.size:
            check_layout(layout, blocks.size)
        check_options("TreeCache", strategy)
        self.strategy = strategy
        self.timeout = self.comm.seconds_of("TreeCache", timeout)
        self._last: tuple[Any, Tensor] | None = None

    def __setattr__(self, name: str, value: object) -> None:
        # Where slots are follows from these: others would be read as if they had been moved there.
        fixed = "comm", "rank", "world_size", "layout", "blocks"
        if name in fixed and hasattr(self, name):
            raise AttributeError(
                f"TreeCache: {name} of a cache cannot be set, as its tokens are where it says; "
                "move them with cache.reshard(layout), or make another TreeCache"
            )
        super().__setattr__(name, value)

    @property
    def decode(self) -> Callable[..., tuple[Tensor, Tensor]]:
        """`tree_decode` for the keys of this cache."""
        if self.blocks.size:
            return functools.partial(tree_decode_by_blocks, block_size=self.blocks.size)
        return tree_decode

    def with_layout(self, layout: ShardLayout) -> "Shard":
        """A shard of the same ranks and settings whose keys are placed by another layout."""
        new = Shard(self.comm, layout, self.strategy, self.timeout, self.blocks)
        new.column = self.column
        return new

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "TreeCache: a cache cannot be pickled, as each rank holds a part of it and a group of "
            "processes; write it with cache.save(directory), and read it with TreeCache.load"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> "Shard":
        # A process group cannot be copied: a copied cache goes on in the same group.
        return self

    def count(self, length: int) -> int:
        """Number of the first `length` global slots that this rank keeps."""
        return self.layout.count(self.rank, length)

    def most(self, length: int) -> int:
        """A bound on the number of slots that this rank keeps of any run of `length`."""
        if not isinstance(self.layout, BlockCyclic):
            return length  # others may give a rank the whole run
        first, *_ = self.layout.key_layout(self.rank)  # where a run has most of its slots
        return self.layout.count(self.rank, first + length)

    def check_holds(self, length: int) -> None:
        """Raises ValueError if one of the first `length` slots is on no rank."""
        layout = self.layout
        if isinstance(layout, Contiguous) and length > layout.bounds[-1]:
            raise ValueError(
                f"TreeCache: {layout} has no rank for slot {length - 1}; "
                "use ContiguousThenCyclic for caches that grow"
            )

    def slots(self, begin: int, end: int, device: torch.device, *, is_own: bool) -> Tensor:
        """The local slots of the global slots in [begin, end), int64, computed once for all layers.

        A slot of another rank is -1, or is left out with `is_own`.
        """
        key = (begin, end, device, is_own)
        # A graph that looked at what is remembered would be compiled again for a call without it.
        # Once: threads whose caches are copies of each other share this object.
        last = None if torch.compiler.is_compiling() else self._last
        if last is not None and last[0] == key:
            return last[1]
        self.check_holds(end)
        if is_own or self.world_size == 1:
            slots = torch.arange(self.count(begin), self.count(end), device=device)
        else:
            slots = self.layout.local_slots_of(self.rank, torch.arange(begin, end, device=device))
        if not torch.compiler.is_compiling():
            self._last = (key, slots)
        return slots

    def exchange(
        self,
        op: str,
        signature: Signature,
        receive: Mapping[int, Tensor],
        send: Mapping[int, Tensor],
        device: torch.device,
    ) -> None:
        """Sends and receives contiguous tensors by rank, as a call of `op`; skips empty ones."""
        received = {rank: _bytes(x) for rank, x in receive.items() if x.numel()}
        sent = {rank: _bytes(x) for rank, x in send.items() if x.numel()}
        link = self.comm.link

        def run(deadline: float) -> None:
            link.exchange_call_ids(deadline)
            link.messages(received, sent, device, has_call_id=False).run(deadline)

        with self.comm.begin(op, self.timeout) as call:
            call.run(signature, run, device)


class Moves:
    """Moves rows of a run of tokens from the ranks that have them to the ranks that need them."""

    def __init__(self, shard: Shard, old: Place, new: Place, length: int) -> None:
        self._exchange = shard.exchange
        # Both ends go through a pair's tokens in increasing order, so their messages fit.
        self._outgoing, self._incoming = (
            {r: (ranks == r).nonzero()[:, 0] for r in range(shard.world_size)}
            for ranks in (
                of.owner(tokens_at(own, shard.rank, length) + first)
                for own, (of, first) in ((old, new), (new, old))
            )
        )

    def apply(self, op: str, signature: Signature, x: Tensor) -> Tensor:
        """Collective: sends the rows `[batch, num_heads_kv, tokens, ...]` of the tokens that this
        rank has, and returns the rows of the tokens that it gets."""

        def empty(count: int) -> Tensor:
            return x.new_empty((*x.shape[:2], count, *x.shape[3:]))

        sent = {r: x.index_select(2, rows.to(x.device)) for r, rows in self._outgoing.items()}
        received = {r: empty(len(rows)) for r, rows in self._incoming.items()}
        self._exchange(op, signature, received, sent, x.device)
        result = empty(sum(map(len, self._incoming.values())))
        for r, rows in self._incoming.items():
            result[:, :, rows.to(x.device)] = received[r]
        return result


def tokens_at(place: Place, rank: int, length: int) -> Tensor:
    """Indices of the tokens that `rank` has of a run of `length`, increasing."""
    layout, first = place
    return layout.local_slots(rank, first, first + length) - first


def _bytes(x: Tensor) -> Tensor:
    return x.view(-1).view(torch.uint8)
