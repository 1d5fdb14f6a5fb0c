# SPDX-License-Identifier: BSD-3-Clause
"""Groups of the ranks that share the weights and the cache of one model."""

from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed import ProcessGroup

from .._numbers import integer
from ..exchange import (
    DEFAULT_TIMEOUT,
    Communicator,
    ExchangeError,
    get_communicator,
    resolve_group,
    sentence,
)
from ..shares import AUTO, ModelShares, Shares, as_shares, is_auto, parts
from .parts import Range

# A slice of an axis begins at a multiple of this, so that rows of 16-bit values stay aligned; by
# shares, of long axes, at one of the numbers that weights of 4 bits are packed in, as a slice that
# begins in between has zeros before it and twice the scales (`quantised`).
_GRANULE, _WIDE_GRANULE = 16, 64
_LONG = 64 * _WIDE_GRANULE  # a granule is then at most 1/64 of the axis

# Every sub-group has connections and threads of its own, so the models of one group share its
# sub-groups. The keys are the group, and a sub-group's ranks in the world.
_sub_groups: WeakKeyDictionary[ProcessGroup, dict[tuple[int, ...], ProcessGroup]]
_sub_groups = WeakKeyDictionary()
# The column of each context group of split heads, and the number of columns.
_columns: WeakKeyDictionary[ProcessGroup, tuple[int, int]] = WeakKeyDictionary()


class Mesh:
    """The ranks of a group as a table: `tensor_parallel_size` columns, a row for each run of as
    many consecutive ranks.

    Ranks of a row, a tensor group, split the heads of keys and values. Ranks of a column, a context
    group, hold the same heads and split the slots of the cache. All ranks of the group split the
    other weights, as Helix does (arXiv:2507.07120). `op` is the function that errors name.
    """

    def __init__(
        self,
        group: ProcessGroup | None,
        tensor_parallel_size: int,
        timeout: float = DEFAULT_TIMEOUT,
        op: str = "parallelize",
        shares: object = None,
    ) -> None:
        found = resolve_group(group)
        self.group = None if found is None or dist.get_world_size() == 1 else found
        self.timeout, self.op = timeout, op
        self.calls = get_communicator(self.group)
        self.rank, self.world_size = self.calls.rank, self.calls.world_size
        size = integer(op, "tensor_parallel_size", tensor_parallel_size)
        self.tensor_parallel_size = size
        if size < 1 or self.world_size % size:
            raise ValueError(
                f"{op}: tensor_parallel_size must divide the group's world size {self.world_size}, "
                f"got {size}"
            )
        self.context_size = self.world_size // size
        measures = is_auto(shares)  # and the caller then takes what it finds
        self.take(ModelShares() if measures else ModelShares.of(op, shares, self.world_size, size))
        self.tensor_rank, self.context_rank = self.rank % size, self.rank // size
        self.tensor_group: ProcessGroup | None = None
        self.context_group: ProcessGroup | None = None
        # A communicator compares ranks whenever the kind of call changes, so each kind has its own.
        self.sums, self.logits = self.calls, self.calls
        self.queries: Communicator | None = None
        if self.group is not None:
            given = AUTO if measures else tuple(self.shares)
            self.calls.agree((("tensor_parallel_size", size), ("shares", given)), timeout, op)
            ranks, first = dist.get_process_group_ranks(self.group), self.rank - self.tensor_rank
            self.tensor_group = self._sub_group(self.group, ranks[first : first + size])
            self.context_group = self._sub_group(self.group, ranks[self.tensor_rank :: size])
            if size > 1:
                _columns[self.context_group] = self.column
            self.sums, self.logits = (Communicator(self.group, timeout) for _ in range(2))

    def connect_for_queries(self) -> None:
        """Makes the communicator for queries that ranks compute in parts, which few models have."""
        self.queries = self.queries or Communicator(self.context_group, self.timeout)

    @property
    def of_layers(self) -> tuple[Communicator, ...]:
        """The communicators of a forward pass, but for the cache's."""
        return (self.sums, self.logits, *([self.queries] if self.queries else []))

    def take(self, shares: ModelShares) -> None:
        """Goes by these shares, before anything is split."""
        self.shares, size = shares, self.tensor_parallel_size
        # Shares of the weights in a context group. Ranks of a tensor group have equal ones.
        by_context = None if shares.weights is None else shares.weights[::size]
        self._context_shares = as_shares(self.op, "shares", by_context, self.context_size)
        self._parts_of_heads: dict[int, list[Range]] = {}  # which every layer asks for

    @property
    def column(self) -> tuple[int, int]:
        """The place of this rank's heads: tensor_rank and tensor_parallel_size."""
        return self.tensor_rank, self.tensor_parallel_size

    def __deepcopy__(self, memo: dict[int, Any]) -> "Mesh":
        # Process groups cannot be copied: a copied model goes on in the same ones.
        return self

    def slice(self, size: int) -> Range:
        """This rank's part [begin, end) of an axis that all ranks of the group split."""
        return self.slices(size)[self.rank]

    def slices(self, size: int) -> list[Range]:
        """The parts [begin, end) of an axis of `size` by rank, in proportion to shares of weights;
        without any their sizes differ by at most 16."""
        return _slices(size, self.world_size, self.shares.weights)

    def context_slices(self, size: int) -> list[Range]:
        """As `slices`, the parts of an axis that the ranks of the context group split."""
        return _slices(size, self.context_size, self._context_shares)

    def own_heads(self, num_heads: int) -> Range:
        """Query heads that this rank keeps after attention, out of `num_heads` of its tensor
        group."""
        return self._heads(num_heads)[self.context_rank]

    def head_counts(self, num_heads: int) -> tuple[int, ...] | None:
        """The number of heads of each rank of the context group, as a merge takes it; None: they
        are split evenly."""
        if self._context_shares is None:
            return None
        return tuple(end - begin for begin, end in self._heads(num_heads))

    def _heads(self, num_heads: int) -> list[Range]:
        if num_heads not in self._parts_of_heads:
            found = parts(num_heads, self.context_size, self._context_shares)
            self._parts_of_heads[num_heads] = found
        return self._parts_of_heads[num_heads]

    def _sub_group(self, group: ProcessGroup, ranks: list[int]) -> ProcessGroup:
        if len(ranks) == self.world_size:
            return group
        known = _sub_groups.setdefault(group, {})
        if (made := known.get(tuple(ranks))) is None:
            try:
                made = known[tuple(ranks)] = _new_group(group, ranks, self.timeout)
            except RuntimeError as error:
                raise ExchangeError(
                    f"{self.op}: rank {self.rank} of {self.world_size}: the group of ranks "
                    f"{ranks} could not be made: {sentence(error)}"
                ) from error
        return made


def _slices(size: int, count: int, shares: Shares) -> list[Range]:
    is_wide = shares is not None and size >= _LONG and size % _WIDE_GRANULE == 0
    return parts(size, count, shares, _WIDE_GRANULE if is_wide else _GRANULE)


def column_of(group: ProcessGroup | Communicator | None) -> tuple[int, int]:
    """The tensor_rank and tensor_parallel_size of the heads in a cache over `group`."""
    if isinstance(group, Communicator):
        group = group.link.group if group.world_size > 1 else None
    return (0, 1) if group is None else _columns.get(group, (0, 1))


class OneRank(Mesh):
    """One rank that has all of a model, for plans, which concern no other rank."""

    def __init__(self, op: str) -> None:
        self.op, self.rank, self.world_size, self.tensor_parallel_size = op, 0, 1, 1
        self.tensor_rank, self.context_rank, self.context_size = 0, 0, 1
        self.take(ModelShares())


def _new_group(group: ProcessGroup, ranks: list[int], timeout: float) -> ProcessGroup:
    """A group of some ranks of `group`, one of them this one; the others take no part."""
    # `torch.distributed.new_group` names groups by how many the process has made, and ranks that
    # have made different numbers of them would never meet, here or in the next one of all ranks.
    world = dist.distributed_c10d._world
    made, _ = dist.distributed_c10d._new_process_group_helper(
        len(ranks),
        ranks.index(dist.get_rank()),
        ranks,
        dist.get_backend_config(group),
        group.get_group_store(),
        f"{group.group_name}/tree_attention/{'_'.join(map(str, ranks))}",  # type: ignore[arg-type]
        timeout=timedelta(seconds=timeout),
    )
    assert isinstance(made, ProcessGroup)  # as this rank is one of them
    world.pg_group_ranks[made] = {rank: i for i, rank in enumerate(ranks)}
    return made
