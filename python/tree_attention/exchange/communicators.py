# SPDX-License-Identifier: BSD-3-Clause
"""The communicators of process groups, made once."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch.distributed as dist

from .communicator import Communicator, resolve_group

_of_group: WeakKeyDictionary[dist.ProcessGroup, Communicator] = WeakKeyDictionary()


def get_communicator(
    group: dist.ProcessGroup | Communicator | None = None, timeout: float | None = None
) -> Communicator:
    """The communicator of `group` (default the world), made at first use and kept with the group.

    `timeout`, if given, becomes its default.
    """
    if isinstance(group, Communicator):
        comm = group
    else:
        group = resolve_group(group)
        if group is None:
            comm = Communicator()
        elif (known := _of_group.get(group)) is not None:
            comm = known
        else:
            comm = _of_group[group] = Communicator(group)
    if timeout is not None:
        comm.timeout = timeout
    return comm
