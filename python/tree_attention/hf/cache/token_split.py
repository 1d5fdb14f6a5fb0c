# SPDX-License-Identifier: BSD-3-Clause
"""The tokens of a prompt's chunk that each rank computes, and the messages of such a pass."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cached_property

import torch
from torch import Tensor

from ...exchange import Signature
from ...sharding import BlockCyclic
from ...shares import Shares
from .shard import Moves, Place, Shard, tokens_at

# By how many tokens ranks may differ: a block of the default layout.
_MAX_DIFFERENCE = BlockCyclic.block
# What a rank receives at a time of the rows of all slots.
_MAX_RECEIVED_BYTES = 32 << 20


class TokenSplit:
    """The tokens of one chunk, split over the ranks of a cache for one forward pass.

    A rank computes the tokens whose slots it keeps, so that keys and values need not move, where
    that gives every rank with a share one or more and their numbers, divided by their shares,
    differ by at most a block. Otherwise tokens go round the ranks, to each as many as its share:
    without shares token `i` of the chunk to rank `i % world_size`. A rank that has none of them
    computes the first one, as models take no empty text, and nothing of it is sent or kept.
    """

    def __init__(
        self,
        shard: Shard,
        begin: int,
        length: int,
        device: torch.device,
        signature: Signature,
        shares: Shares = None,
    ) -> None:
        self.shard, self.begin, self.length, self.device = shard, begin, length, device
        self.end = begin + length
        layout, ranks = shard.layout, range(shard.world_size)
        kept = [layout.count(r, self.end) - layout.count(r, begin) for r in ranks]
        # A layout may end before the chunk does. Writing the cache then says so.
        is_whole = sum(kept) == length
        weights = shares or (1,) * len(ranks)
        by_share = [count / weight for count, weight in zip(kept, weights, strict=True) if weight]
        is_fair = min(by_share) > 0 and max(by_share) - min(by_share) <= _MAX_DIFFERENCE
        has_none = all(weight or not count for count, weight in zip(kept, weights, strict=True))
        self.is_by_owner = is_whole and is_fair and has_none
        # Tokens that go round the ranks have the place of slots in blocks of one.
        self._place: Place = (layout, begin)
        if not self.is_by_owner:
            self._place = BlockCyclic(len(ranks), 1, shares), 0
        # By rank, indices in the chunk of the tokens that it computes, increasing.
        self.tokens = [tokens_at(self._place, r, length).to(device) for r in ranks]
        self.is_idle = not len(self.tokens[shard.rank])
        # The tokens that the model of this rank is given.
        self.own = self.tokens[shard.rank]
        if self.is_idle:
            self.own = torch.zeros(1, dtype=torch.int64, device=device)
        # The sizes of all messages follow from it, the layout and the model: the ranks compare it
        # before the first message of a chunk, and the others pass without.
        self._signature: Signature = (
            ("first slot and number of tokens of the chunk", (begin, length)),
            ("layout", layout),
            ("shares of a prompt", shares),
            *signature,
        )
        self._memory: dict[str, Tensor] = {}

    @cached_property
    def _moves(self) -> Moves:
        return Moves(self.shard, self._place, (self.shard.layout, self.begin), self.length)

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
        """The keys and values of the chunk's slots that this rank keeps, in the order of slots.

        Given the keys and values of the tokens that it computed, `[batch, num_heads_kv, tokens,
        head_dim]`, it exchanges them with the other ranks.
        """
        if self.is_idle:
            keys, values = keys[:, :, :0], values[:, :, :0]
        if self.is_by_owner:
            return keys, values
        rows = self._moves.apply("prefill", self._signature, torch.cat((keys, values), dim=3))
        return rows[..., : keys.shape[3]], rows[..., keys.shape[3] :]

    def all_rows(self, name: str, x: Tensor, block: int = 1) -> Tensor:
        """Collective: the rows `[batch, heads, slots, ...]` of all slots before the chunk's end, of
        which `x` has this rank's, in memory that layers share by the name. Uninitialised rows
        follow, so that there is a whole number of blocks of `block` rows."""
        layout, rank = self.shard.layout, self.shard.rank
        num_rows = -(-self.end // block) * block
        whole = self.room(f"all {name}", (*x.shape[:2], num_rows, *x.shape[3:]), x.dtype)
        if whole.nbytes == 0:  # values of latents
            return whole
        step = max(1, _MAX_RECEIVED_BYTES * num_rows // whole.nbytes)
        for begin in range(0, self.end, step):
            end = min(begin + step, self.end)
            slots = [
                layout.local_slots(r, begin, end).to(x.device) for r in range(self.shard.world_size)
            ]
            received = {
                r: self.room(f"rows of {r}", (*x.shape[:2], len(places), *x.shape[3:]), x.dtype)
                for r, places in enumerate(slots)
                if r != rank
            }
            own = x[:, :, layout.count(rank, begin) : layout.count(rank, end)].contiguous()
            self.exchange(received, dict.fromkeys(received, own))
            for r, rows in {**received, rank: own}.items():
                whole[:, :, slots[r]] = rows
        return whole

    def of_last_rank(self, x: Tensor) -> Tensor:
        """Return the `x [batch, 1, ...]` of the last token, with the same bits on every rank."""
        x, rank, (layout, first) = x.contiguous(), self.shard.rank, self._place
        last_rank = layout.owner(first + self.length - 1)
        if rank == last_rank:
            others = set(range(self.shard.world_size)) - {rank}
            self.exchange({}, dict.fromkeys(others, x))
            return x
        result = x.new_empty((x.shape[0], 1, *x.shape[2:]))  # also where this rank has no tokens
        self.exchange({last_rank: result}, {})
        return result


# A thread begins without one.
_active: ContextVar[TokenSplit | None] = ContextVar("_active", default=None)


@contextmanager
def using_token_split(split: TokenSplit) -> Iterator[None]:
    """Surrounds a forward pass of this thread over this rank's tokens of a chunk."""
    token = _active.set(split)
    try:
        yield
    finally:
        _active.reset(token)


def current_token_split() -> TokenSplit | None:
    """The split of the forward pass that this thread is in. Compiled graphs are never split."""
    return None if torch.compiler.is_compiling() else _active.get()
