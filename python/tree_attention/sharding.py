# SPDX-License-Identifier: BSD-3-Clause
"""Which rank holds which slot of a key/value cache.

A *global slot* is the index of a token in the cache of its sequence; its *local slot* is the index
of the same token in the shard of the rank that holds it. In every layout the local order follows
the global order, so a half-open range of global slots is one half-open range on each shard:
`key_ranges` needs nothing else to express causal, padded and windowed attention there.

Slots and lengths, from 0 on, are integers or integer tensors of any shape and device; tensors come
back as int64. The arithmetic is exact. Nothing is read back from a GPU, except by
`Contiguous.owner`, which checks its argument.
"""

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TypeVar

import torch
from torch import Tensor

from ._numbers import as_integer, integer, shown
from .shares import Shares, as_shares

Slots = TypeVar("Slots", int, Tensor)
_MAX_SLOT = (1 << 31) - 1  # of chosen slots, which are int32


def _clamp(x: Slots, low: int, high: int | None) -> Slots:
    if isinstance(x, Tensor):
        return x.clamp(low, high)
    return max(low, x if high is None else min(x, high))


def _last_bound(x: Slots, bounds: tuple[int, ...]) -> Slots:
    """The largest `i` with `bounds[i] <= x`."""
    if isinstance(x, Tensor):
        edges = torch.tensor(bounds, dtype=torch.int64, device=x.device)
        return torch.searchsorted(edges, x, right=True) - 1
    return bisect_right(bounds, x) - 1


def _where(condition: bool | Tensor, then: Slots, otherwise: Slots | int) -> Slots:
    if isinstance(condition, Tensor):
        return torch.where(condition, then, otherwise)  # type: ignore[return-value]
    return then if condition else otherwise  # type: ignore[return-value]


class ShardLayout(ABC):
    """A partition of the global slots over `world_size` ranks.

    On every rank, local slots follow each other in the order of their global slots.

    For example::

        from tree_attention import BlockCyclic, ShardLayout

        def lengths(layout: ShardLayout, length: int) -> list[int]:
            return [layout.count(rank, length) for rank in range(layout.world_size)]

        print(lengths(BlockCyclic(2, block=4), 10))  # [6, 4]
    """

    world_size: int

    @abstractmethod
    def count(self, rank: int, length: Slots) -> Slots:
        """Number of the first `length` global slots that `rank` holds.

        Raises:
            ValueError: there is no such rank. All methods that take a rank raise it.
            TypeError: an argument is no integer. All methods raise it.
        """

    @abstractmethod
    def owner(self, slots: Slots) -> Slots:
        """The rank that holds each global slot.

        Raises:
            ValueError: a slot is below 0, which is not looked for in a tensor of a GPU.
        """

    def global_slots(self, rank: int, local_slots: Slots) -> Slots:
        """The global slot of each local slot of `rank`."""
        first, block, stride = self.key_layout(rank)
        local_slots = self._int64("local_slots", local_slots)
        return first + local_slots // block * stride + local_slots % block

    @abstractmethod
    def key_layout(self, rank: int) -> tuple[int, int, int]:
        """The arithmetic of `global_slots` as three numbers, which `lean_decode` takes for ALiBi.

        Returns:
            `(first, block, stride)`: local slot `j` of `rank` is the global slot
            `first + (j // block) * stride + j % block`.

        Raises:
            ValueError: the layout has no such three numbers.
        """

    def local_range(self, rank: int, begin: Slots, end: Slots) -> tuple[Slots, Slots]:
        """The local slots `[begin, end)` of `rank` that hold its part of a global `[begin, end)`.

        If the rank holds no slot of the global range, the returned begin is not below the end.
        """
        return self.count(rank, begin), self.count(rank, end)

    def local_slots(self, rank: int, begin: int, end: int) -> Tensor:
        """The global slots in `[begin, end)` that `rank` holds: an increasing int64 tensor.

        Equivalent PyTorch::

            slots = torch.arange(begin, end)
            slots[layout.owner(slots) == rank]
        """
        begin, end = self._integer("begin", begin), self._integer("end", end)
        first, last = self.local_range(rank, begin, end)
        local = torch.arange(first, max(first, last), dtype=torch.int64, device="cpu")
        return self.global_slots(rank, local)

    def local_slots_of(self, rank: int, slots: Slots) -> Slots:
        """The local slot at which `rank` holds each global slot, -1 for those that it does not.

        Unlike `owner`, it reads no tensor: a slot that no rank holds is not held here.

        Equivalent PyTorch::

            torch.where(layout.owner(slots) == rank, layout.count(rank, slots), -1)
        """
        slots = self._int64("slots", slots)
        local = self.count(rank, slots)
        return _where(self.count(rank, slots + 1) > local, local, -1)

    def local_rows(self, rank: int, slots: Tensor, block: int = 1) -> Tensor:
        """The local slots of `rank` among chosen global slots, or blocks of slots.

        Equivalent PyTorch, for one choice of slots::

            held = layout.local_slots_of(rank, slots[slots >= 0]).sort().values
            rows = torch.full_like(slots, -1)
            rows[: (held >= 0).sum()] = held[held >= 0]

        Args:
            slots: integers `[..., n]`: what `all_merge_topk` returns; those below 0 are none.
            block: slots of a block, where blocks were chosen.

        Returns:
            int32 `[..., n * block]`: the local slots in ascending order, and then -1. It is what
            `patterns.by_rows` takes.

        Raises:
            TypeError: slots are no tensor of integers.
            ValueError: slots have no axis or, which is not looked for on a GPU, begin at 2^31 or
                beyond.

        For example::

            import torch
            from tree_attention import BlockCyclic

            layout = BlockCyclic(world_size=2, block=4)  # rank 0 holds slots 0 to 3, 8 to 11, ...
            chosen = torch.tensor([9, 5, 2, -1])
            print(layout.local_rows(0, chosen).tolist())  # [2, 5, -1, -1]
        """
        block = integer(type(self).__name__, "block", block, 1, _MAX_SLOT)
        if not isinstance(slots, Tensor):
            raise TypeError(f"{type(self).__name__}: slots must be a tensor, got {shown(slots)}")
        if slots.dim() == 0:
            raise ValueError(f"{type(self).__name__}: slots must have shape [..., n], got []")
        slots = self._int64("slots", slots)
        if slots.device.type == "cpu" and slots.numel() and not torch.compiler.is_compiling():
            largest = int(slots.max())
            if largest > _MAX_SLOT // block:
                raise ValueError(
                    f"{type(self).__name__}: slots must be below 2^31, got {largest}"
                    + (f" as a block of {block}" if block > 1 else "")
                )
        if block > 1:
            offsets = torch.arange(block, device=slots.device)
            slots = torch.where(slots < 0, -1, slots * block)[..., None]
            slots = torch.where(slots < 0, -1, slots + offsets).flatten(-2)
        rows = self.local_slots_of(rank, slots).int()
        behind = torch.iinfo(torch.int32).max
        rows = torch.where(rows < 0, behind, rows).sort().values
        return torch.where(rows == behind, -1, rows)

    def _integer(self, name: str, value: object) -> int:
        found = as_integer(value)
        if found is None:
            raise TypeError(f"{type(self).__name__}: {name} must be an integer, got {value!r:.80}")
        return found

    def _at_least_1(self, name: str, value: object) -> int:
        return integer(type(self).__name__, name, value, 1)

    def _int64(self, name: str, x: Slots) -> Slots:
        if not isinstance(x, Tensor):
            return self._integer(name, x)
        if x.dtype == torch.bool or x.is_floating_point() or x.is_complex():
            raise TypeError(f"{type(self).__name__}: {name} must be integers, got {x.dtype}")
        return x.long()

    def _slots(self, x: Slots) -> Slots:
        slots = self._int64("slots", x)
        if isinstance(slots, Tensor):
            least = int(slots.min()) if slots.device.type == "cpu" and slots.numel() else 0
        else:
            least = slots
        # Without this: slots below 0 have an owner.
        if least < 0:
            raise ValueError(f"{type(self).__name__}: slots must be at least 0, got {least}")
        return slots

    def _rank(self, rank: int) -> int:
        found = self._integer("rank", rank)
        if not 0 <= found < self.world_size:
            raise ValueError(
                f"{type(self).__name__}: rank must be in [0, {self.world_size}), got {rank}"
            )
        return found


@dataclass(frozen=True)
class BlockCyclic(ShardLayout):
    """Blocks of `block` slots, which the ranks get in turn, each as many as its share says.

    In each cycle of `sum(shares) * block` slots rank `r` holds one run of `shares[r] * block`. The
    shards stay in proportion while a sequence grows: without shares their lengths differ by at most
    a block, and else each is within its run of what its share of the slots is.

    Args:
        shares: one integer from 0 to 1,024 for each rank, not all of them 0, for ranks of unequal
            speed or memory. Their common divisor is taken out. A rank with 0 holds no slots. None
            and equal ones mean the same, and are None.

    Raises:
        TypeError, ValueError: `world_size` or `block` is not an integer of at least 1, or `shares`
            are not such integers.

    For example::

        from tree_attention import BlockCyclic

        layout = BlockCyclic(world_size=2, block=4)
        print(layout.local_slots(0, 0, 10).tolist())  # [0, 1, 2, 3, 8, 9]
        print(layout.owner(9))  # 0

        layout = BlockCyclic(world_size=2, block=4, shares=(3, 1))
        print(layout.count(0, 32), layout.count(1, 32))  # 24 8
    """

    world_size: int
    block: int = 64
    shares: Shares = None

    def __post_init__(self) -> None:
        for name in ("world_size", "block"):
            object.__setattr__(self, name, self._at_least_1(name, getattr(self, name)))
        shares = as_shares(type(self).__name__, "shares", self.shares, self.world_size)
        object.__setattr__(self, "shares", shares)

    def __repr__(self) -> str:
        shares = "" if self.shares is None else f", shares={self.shares}"
        return f"{type(self).__name__}(world_size={self.world_size}, block={self.block}{shares})"

    def _run(self, rank: int) -> tuple[int, int, int]:
        """The first slot of a rank's run in a cycle, the size of the run, and of the cycle."""
        rank = self._rank(rank)
        if self.shares is None:
            return rank * self.block, self.block, self.world_size * self.block
        first, total = sum(self.shares[:rank]), sum(self.shares)
        return first * self.block, self.shares[rank] * self.block, total * self.block

    def count(self, rank: int, length: Slots) -> Slots:
        first, size, cycle = self._run(rank)
        length = _clamp(self._int64("length", length), 0, None)
        return length // cycle * size + _clamp(length % cycle - first, 0, size)

    def local_slots_of(self, rank: int, slots: Slots) -> Slots:
        # With half of the divisions that two counts have.
        first, size, cycle = self._run(rank)
        slots = self._int64("slots", slots)
        within = slots % cycle - first
        local = _clamp(slots // cycle * size + within, -1, None)  # of a slot below 0 negative
        return _where((within >= 0) & (within < size), local, -1)

    def owner(self, slots: Slots) -> Slots:
        blocks = self._slots(slots) // self.block
        if self.shares is None:
            return blocks % self.world_size
        # If several ranks begin at one place, all but the last of these have a share of 0.
        bounds = tuple(accumulate(self.shares, initial=0))
        return _last_bound(blocks % bounds[-1], bounds)

    def key_layout(self, rank: int) -> tuple[int, int, int]:
        first, size, cycle = self._run(rank)
        return first, size or self.block, cycle  # a block of 1 or more, also where it is empty


@dataclass(frozen=True)
class _Bounded(ShardLayout):
    """A layout that begins with one run of slots for each rank."""

    bounds: tuple[int, ...]

    def __post_init__(self) -> None:
        layout, bounds = type(self).__name__, self.bounds
        if not isinstance(bounds, Iterable):
            raise TypeError(f"{layout}: bounds must be integers, got {bounds!r}")
        checked = tuple(self._integer("bounds", bound) for bound in bounds)
        if len(checked) < 2 or checked[0] != 0 or any(a > b for a, b in pairwise(checked)):
            raise ValueError(
                f"{layout}: bounds must be world_size + 1 non-decreasing integers from 0, "
                f"got {list(checked)}"
            )
        object.__setattr__(self, "bounds", checked)

    @property
    def world_size(self) -> int:  # type: ignore[override]
        return len(self.bounds) - 1


class Contiguous(_Bounded):
    """One run of slots for each rank: rank `r` holds the slots `[bounds[r], bounds[r + 1])`.

    Shards may be uneven or empty. No rank holds the slots from `bounds[-1]` on: `count` leaves them
    out, and `owner` raises ValueError for them.

    Args:
        bounds: `world_size + 1` non-decreasing integers; the first is 0.

    Raises:
        TypeError, ValueError: `bounds` are not such integers.

    For example::

        from tree_attention import Contiguous

        layout = Contiguous((0, 3, 10))
        print(layout.local_slots(1, 0, 10).tolist())  # [3, 4, 5, 6, 7, 8, 9]
    """

    def count(self, rank: int, length: Slots) -> Slots:
        rank = self._rank(rank)
        begin, end = self.bounds[rank], self.bounds[rank + 1]
        return _clamp(self._int64("length", length) - begin, 0, end - begin)

    def owner(self, slots: Slots) -> Slots:
        slots = self._slots(slots)
        largest = max(slots.flatten().tolist(), default=-1) if isinstance(slots, Tensor) else slots
        if largest >= self.bounds[-1]:
            raise ValueError(
                f"Contiguous: slots must be below bounds[-1] = {self.bounds[-1]}, got {largest}"
            )
        return _last_bound(slots, self.bounds)

    def key_layout(self, rank: int) -> tuple[int, int, int]:
        return self.bounds[self._rank(rank)], 1, 1


@dataclass(frozen=True)
class ContiguousThenCyclic(_Bounded):
    """`Contiguous` for the slots of a prompt and `BlockCyclic` for those appended after it.

    It continues what a sequence-parallel prefill leaves: slots below `bounds[-1]` are
    `Contiguous(bounds)`, later ones go to the ranks in turn in blocks of `block`, from rank 0 on.

    Raises:
        TypeError, ValueError: as in `Contiguous` and `BlockCyclic`.

    For example::

        from tree_attention import ContiguousThenCyclic

        layout = ContiguousThenCyclic((0, 3, 6), block=2)  # a prompt of 6 tokens
        print(layout.local_slots(0, 0, 10).tolist())  # [0, 1, 2, 6, 7]
    """

    block: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "block", self._at_least_1("block", self.block))

    @property
    def contiguous(self) -> Contiguous:
        """The layout of the slots below `bounds[-1]`."""
        return Contiguous(self.bounds)

    @property
    def cyclic(self) -> BlockCyclic:
        """The layout of the slots from `bounds[-1]` on, counted from there."""
        return BlockCyclic(self.world_size, self.block)

    def count(self, rank: int, length: Slots) -> Slots:
        length = self._int64("length", length)
        appended = length - self.bounds[-1]
        return self.contiguous.count(rank, length) + self.cyclic.count(rank, appended)

    def owner(self, slots: Slots) -> Slots:
        slots = self._slots(slots)
        prefilled = _last_bound(slots, self.bounds)
        appended = self.cyclic.owner(_clamp(slots - self.bounds[-1], 0, None))
        return _where(slots < self.bounds[-1], prefilled, appended)

    def global_slots(self, rank: int, local_slots: Slots) -> Slots:
        local_slots = self._int64("local_slots", local_slots)
        num_prefilled = self.contiguous.count(rank, self.bounds[-1])
        prefilled = self.contiguous.global_slots(rank, local_slots)
        appended = self.bounds[-1] + self.cyclic.global_slots(rank, local_slots - num_prefilled)
        return _where(local_slots < num_prefilled, prefilled, appended)

    def key_layout(self, rank: int) -> tuple[int, int, int]:
        """Not available: the local slots have no single key_layout.

        For ALiBi, attend in two calls and merge the states: to the first
        `contiguous.count(rank, bounds[-1])` local slots with the key_layout of `contiguous`, and to
        the others with the key_layout of `cyclic`, its `first` increased by `bounds[-1]`.

        Raises:
            ValueError: always.
        """
        self._rank(rank)
        raise ValueError(
            "ContiguousThenCyclic: its local slots have no single key_layout; call lean_decode for "
            "the contiguous and for the cyclic part, and merge_states of both"
        )
