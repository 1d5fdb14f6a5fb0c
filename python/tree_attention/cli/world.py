# SPDX-License-Identifier: BSD-3-Clause
"""The ranks that torchrun started, or this process alone."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class World:
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1

    @property
    def root(self) -> bool:
        """Whether this rank talks to the user."""
        return self.rank == 0


@contextmanager
def joined_world(backend: str = "gloo") -> Iterator[World]:
    """The world that torchrun describes in the environment, as the default process group.

    Also gives each rank its share of the CPUs as threads: torchrun sets OMP_NUM_THREADS to 1
    whatever the machine has. Another value of OMP_NUM_THREADS is left alone.
    """
    variables = {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    if None in variables.values():
        yield World()
        return
    rank, size, local_rank = (int(value) for value in variables.values() if value is not None)
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    world = World(rank, size, local_rank, local_size)
    if os.environ.get("OMP_NUM_THREADS") in (None, "1"):
        torch.set_num_threads(max(1, num_cpus() // local_size))
    if local_size == size and sys.platform == "linux":
        # One machine: its host name need not resolve to an address that can be reached.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(backend)
    yield world
    dist.destroy_process_group()  # not after an error: it could wait for a lost rank


def num_cpus() -> int:
    """CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
