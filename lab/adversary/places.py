# SPDX-License-Identifier: BSD-3-Clause
"""Where ranks stand: a group for many cases, and a right call that must work after each."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from helpers import Problem
from tree_attention import Communicator, tree_decode

from . import model
from .outcome import AMPLE, attempt


@dataclass
class Place:
    """Where a rank stands: one group for many cases, until a case ends it."""

    rank: int
    world_size: int
    group: dist.ProcessGroup
    comm: Communicator

    def probe(self) -> None:
        """The next right call works."""
        assert self.comm.failed is None, f"the communicator is dead: {self.comm.failed}"
        torch.manual_seed(0)
        q, k, v = torch.randn(1, 2, 1, 8), *torch.randn(2, 1, 2, 6, 8)
        problem = Problem(q, k, v)
        own = slice(self.rank, None, self.world_size)
        found = attempt(tree_decode, q, k[:, :, own], v[:, :, own], group=self.comm).result()
        model.check_attention(found, model.attention(problem), problem, torch.float32)


_places: dict[int, Place] = {}


def place(world_size: int, rank: int) -> Place:
    known = _places.get(world_size)
    if known is None:
        group = dist.new_group(range(world_size))
        known = _places[world_size] = Place(rank, world_size, group, Communicator(group, AMPLE))
    return known


def leave(world_size: int) -> None:
    """Of a group that a case has ended, as it was meant to."""
    dist.destroy_process_group(_places.pop(world_size).group)
