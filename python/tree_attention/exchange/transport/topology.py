# SPDX-License-Identifier: BSD-3-Clause
"""Which ranks share a node, and which runs of ranks may merge among themselves first."""

import math
import os
import socket
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
import torch.distributed as dist

from ..._environment import VariableError, read_integer

# Ranks that name the same node here share one, whatever their hosts are called.
NODE_VARIABLE = "TREE_ATTENTION_NODE"
_MAX_RANKS = 1 << 20


@dataclass(frozen=True)
class Topology:
    """The node of every rank of a group: numbers from 0, in order of first appearance."""

    nodes: tuple[int, ...]

    @staticmethod
    def of(names: Sequence[object]) -> "Topology":
        """From anything that is equal for ranks of one node, in rank order."""
        numbers: dict[object, int] = {}
        # Tensors are equal to themselves alone.
        values = (name.item() if isinstance(name, torch.Tensor) else name for name in names)
        return Topology(tuple(numbers.setdefault(value, len(numbers)) for value in values))

    @property
    def world_size(self) -> int:
        return len(self.nodes)

    @cached_property
    def num_nodes(self) -> int:
        return len(set(self.nodes))

    @cached_property
    def subtree_size(self) -> int:
        """Ranks that a node may merge before it asks others, without changing a bit.

        Aligned runs of 2^k ranks are subtrees of the canonical order: the largest run that divides
        the world and lies within a node everywhere. A node of 4 + 2 ranks is three runs of two; an
        odd node forwards every state by itself.
        """
        boundaries = [i for i, (a, b) in enumerate(pairwise(self.nodes), 1) if a != b]
        divisor = math.gcd(self.world_size, *boundaries)
        return divisor & -divisor

    def __str__(self) -> str:
        sizes = sorted({*Counter(self.nodes).values()})
        ranks = " or ".join(map(str, sizes))
        plural = "s" * (self.num_nodes > 1)
        return f"{self.num_nodes} node{plural} of {ranks} rank{'s' * (sizes != [1])}"


def node_name() -> str:
    """Name that this process shares with the ranks of its node and with no others.

    `TREE_ATTENTION_NODE` if set. Else the host's name, which containers on several hosts may share,
    and the first rank that torchrun started on the same host (LOCAL_RANK, LOCAL_WORLD_SIZE).
    """
    if named := os.environ.get(NODE_VARIABLE):
        return named
    first_rank = None
    if dist.is_initialized():
        # Engines set these for purposes of their own: what means nothing here is not used.
        with suppress(VariableError):
            rank, local_size = dist.get_rank(), read_integer("LOCAL_WORLD_SIZE", 1, _MAX_RANKS)
            local_rank = rank % local_size
            with suppress(VariableError):
                local_rank = read_integer("LOCAL_RANK", 0, local_size - 1)
            first_rank = rank - local_rank
    return f"{socket.gethostname()}/{first_rank}"
