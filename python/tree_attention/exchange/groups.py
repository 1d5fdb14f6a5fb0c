# SPDX-License-Identifier: BSD-3-Clause
"""Which communicator a caller means: the communicators of process groups, made once."""

from __future__ import annotations

import os
import threading
from weakref import WeakKeyDictionary

import torch.distributed as dist

from .communicator import Communicator
from .options import resolve_group

_communicators: WeakKeyDictionary[dist.ProcessGroup, Communicator] = WeakKeyDictionary()
_making = threading.Lock()


def _free_lock() -> None:
    """In a forked child, where the thread that held the lock does not exist."""
    global _making
    _making = threading.Lock()


os.register_at_fork(after_in_child=_free_lock)


def get_communicator(group: dist.ProcessGroup | Communicator | None = None) -> Communicator:
    """The communicator of `group`, by default the world: made at first use, kept with the group."""
    if isinstance(group, Communicator):
        return group
    group = resolve_group(group)
    if group is None:
        return Communicator()
    with _making:  # or two threads would make two, and ranks count them
        comm = _communicators.get(group)
        if comm is None:
            comm = _communicators[group] = Communicator(group)
        return comm


def name_of(group: dist.ProcessGroup | Communicator) -> str:
    """The string that stands for `group` in a compiled graph."""
    return group.name if isinstance(group, Communicator) else group.group_name


def named(name: str | None) -> Communicator:
    """The communicator of the group that `name_of` named; None is the world."""
    if name is None:
        return get_communicator()
    comm = Communicator.by_name.get(name)
    if comm is not None:
        return comm
    return get_communicator(dist.distributed_c10d._resolve_process_group(name))  # type: ignore[arg-type]
