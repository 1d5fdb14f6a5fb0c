# SPDX-License-Identifier: BSD-3-Clause
"""Which tokens of a prompt's chunk each rank computes, and the messages of a dealt forward pass."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cached_property

import torch
from torch import Tensor

from ...exchange import Signature
from ..cache.shard import Shard

# By how many tokens ranks may differ: a block of the default layout.
_MAX_DIFFERENCE = 64


class Deal:
    """The tokens of one chunk, dealt to the ranks of a cache for one forward pass.

    A rank computes the tokens whose slots it keeps, so that keys and values need not move, where
    that gives every rank one or more and their numbers differ by at most a block. Otherwise tokens
    are dealt in turn: token `i` of the chunk to rank `i % world_size`.
    """

    def __init__(
        self, shard: Shard, begin: int, length: int, device: torch.device, signature: Signature
    ) -> None:
        self.shard, self.begin, self.length, self.device = shard, begin, length, device
        self.end = begin + length
        layout, ranks = shard.layout, range(shard.world_size)
        kept = [layout.count(r, self.end) - layout.count(r, begin) for r in ranks]
        # A layout may end before the chunk does. Writing the cache then says so.
        is_whole = sum(kept) == length
        self.is_by_owner = is_whole and min(kept) > 0 and max(kept) - min(kept) <= _MAX_DIFFERENCE
        dealt = [len(range(r, length, len(ranks))) for r in ranks]
        self.counts = kept if self.is_by_owner else dealt  # of tokens, by rank
        # The sizes of all messages follow from it, the layout and the model: the ranks compare it
        # before the first message of a chunk, and the others pass without.
        self._signature: Signature = (
            ("first slot and number of tokens of the chunk", (begin, length)),
            ("layout", layout),
            *signature,
        )
        self._memory: dict[str, Tensor] = {}

    def tokens(self, rank: int) -> Tensor:
        """Indices in the chunk of the tokens that `rank` computes, increasing."""
        if self.is_by_owner:
            tokens = self.shard.layout.local_slots(rank, self.begin, self.end) - self.begin
        else:
            tokens = torch.arange(rank, self.length, self.shard.world_size, device="cpu")
        return tokens.to(self.device)

    @cached_property
    def own(self) -> Tensor:
        """Indices in the chunk of the tokens that this rank computes."""
        return self.tokens(self.shard.rank)

    @property
    def last_rank(self) -> int:
        """The rank that computes the last token."""
        if self.is_by_owner:
            return self.shard.layout.owner(self.end - 1)
        return (self.length - 1) % self.shard.world_size

    @cached_property
    def moves(self) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        """Which of the tokens that this rank computes each rank keeps, as indices among them, and
        which of the chunk's slots that this rank keeps each rank computes, likewise."""
        rank, ranks = self.shard.rank, range(self.shard.world_size)
        slots = torch.arange(self.begin, self.end, device="cpu")
        owners = self.shard.layout.owner(slots).to(self.device)
        kept = (owners == rank).nonzero()[:, 0]
        return (
            {r: (owners[self.own] == r).nonzero()[:, 0] for r in ranks},
            {r: (kept % len(ranks) == r).nonzero()[:, 0] for r in ranks},
        )

    def room(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Uninitialised memory that all layers of the forward pass share by its name."""
        num_bytes = math.prod(shape) * dtype.itemsize
        block = self._memory.get(name)
        if block is None or block.numel() < num_bytes:
            block = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
            self._memory[name] = block
        return block[:num_bytes].view(dtype).view(*shape)

    def exchange(self, receive: Mapping[int, Tensor], send: Mapping[int, Tensor]) -> None:
        """Sends and receives contiguous tensors by rank; empty ones are skipped."""
        self.shard.exchange("prefill", self._signature, receive, send, self.device)

    def rows_of_owner(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values of the chunk's slots that this rank keeps, in order, from those of
        the tokens that it computed, `[batch, num_heads_kv, tokens, head_dim]`."""
        if self.is_by_owner:
            return keys, values
        outgoing, incoming = self.moves
        rows = torch.cat((keys, values), dim=3)
        batch, num_heads_kv, _, width = rows.shape
        sent = {r: rows.index_select(2, tokens) for r, tokens in outgoing.items()}
        received = {
            r: self.room(f"rows of {r}", (batch, num_heads_kv, len(slots), width), rows.dtype)
            for r, slots in incoming.items()
        }
        self.exchange(received, sent)
        num_kept = sum(len(slots) for slots in incoming.values())
        kept = self.room("kept rows", (batch, num_heads_kv, num_kept, width), rows.dtype)
        for r, slots in incoming.items():
            kept.index_copy_(2, slots, received[r])
        return kept[..., : keys.shape[3]], kept[..., keys.shape[3] :]

    def of_last_rank(self, x: Tensor) -> Tensor:
        """Return the `x` of the rank of the last token, with the same bits on every rank."""
        x = x.contiguous()
        if self.shard.rank == self.last_rank:
            others = set(range(self.shard.world_size)) - {self.last_rank}
            self.exchange({}, dict.fromkeys(others, x))
            return x
        result = torch.empty_like(x)
        self.exchange({self.last_rank: result}, {})
        return result


# A thread begins without one.
_active: ContextVar[Deal | None] = ContextVar("_active", default=None)


@contextmanager
def dealing(deal: Deal) -> Iterator[None]:
    """Surrounds a forward pass of this thread over this rank's tokens of a chunk."""
    token = _active.set(deal)
    try:
        yield
    finally:
        _active.reset(token)


def current_deal() -> Deal | None:
    """The deal of the forward pass that this thread is in. Compiled graphs are never dealt."""
    return None if torch.compiler.is_compiling() else _active.get()
