# SPDX-License-Identifier: BSD-3-Clause
"""The processes that torchrun started, or this one alone."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class World:
    """This process's place among those that torchrun started."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0  # among the processes on this machine

    @property
    def root(self) -> bool:
        """Whether this rank talks to the user."""
        return self.rank == 0


@contextmanager
def joined_world(backend: str = "gloo") -> Iterator[World]:
    """Joins the processes that torchrun describes in the environment to the default process group.

    Each rank also gets its share of the machine's CPUs as threads, because torchrun sets
    OMP_NUM_THREADS to 1 whatever the machine has; any other value of OMP_NUM_THREADS is kept.
    Without torchrun, the world is this process alone.
    """
    variables = {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    if None in variables.values():
        yield World()
        return
    rank, size, local_rank = (int(value) for value in variables.values() if value is not None)
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    if os.environ.get("OMP_NUM_THREADS") in (None, "1"):
        torch.set_num_threads(max(1, num_cpus() // local_size))
    if local_size == size and sys.platform == "linux":
        # On one machine, whose host name need not resolve to an address that can be reached.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(backend)
    yield World(rank, size, local_rank)
    dist.destroy_process_group()  # not after an error, when it could wait for a lost rank


def num_cpus() -> int:
    """The number of CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
