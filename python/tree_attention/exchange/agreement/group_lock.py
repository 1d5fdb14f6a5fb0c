# SPDX-License-Identifier: BSD-3-Clause
"""The lock of a process group, which one thread of the process that made the group may hold.

Messages of a group carry no name of the call they belong to. Calls of two threads would be mixed,
and a forked child would write into the connections of its parent.
"""

import os
import threading
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch.distributed as dist

from ..notes import ExchangeError

# What a server writes whose threads have names that mean nothing.
ADVICE = "name the caller: with Communicator(group).turn('step', name='server'): ..."


class GroupLock:
    """The lock of a process group, which a thread holds for the length of a call."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._depth = 0
        self._holder = "", ""  # function and thread, of the outermost
        self._name: str | None = None
        # Threads that have held the lock, by their names.
        self._threads: WeakValueDictionary[str, threading.Thread] = WeakValueDictionary()
        self.is_inherited = False  # from the process that this one was forked from

    @property
    def name(self) -> str:
        """Name of the caller, which ranks compare: its thread's name, unless it gave another."""
        return self._holder[1] if self._name is None else f"{self._name} of Communicator.turn"

    def acquire(self, op: str, name: str | None = None) -> None:
        """Takes the lock for `op`. A thread may take it again, and releases it as often.

        `name`: what ranks compare in place of the thread's name, whatever thread it is.
        """
        self.check_process(op)
        check_name(name)
        if not self._lock.acquire(blocking=False):
            raise ExchangeError(
                f"{op}: thread {threading.current_thread().name!r} called while {self._holder[0]} "
                f"in thread {self._holder[1]!r} was under way in this process group. Calls of two "
                "threads would be mixed: give each thread a process group of its own "
                "(torch.distributed.new_group, in the same order on every rank), or wait for one "
                "another"
            )
        if self._depth == 0:
            thread = threading.current_thread()
            if name is None:
                other = self._threads.setdefault(thread.name, thread)
                if other is not thread and other.name == thread.name and other.is_alive():
                    self._lock.release()
                    raise ExchangeError(
                        f"{op}: two threads of this process are named {thread.name!r}, and ranks "
                        "tell the threads that share a process group by their names; give each a "
                        f"name of its own, the same on all ranks, or {ADVICE}"
                    )
                self._threads[thread.name] = thread
            self._holder = op, thread.name
            self._name = name
        self._depth += 1

    def check_process(self, op: str) -> None:
        """Raises ExchangeError in a forked child."""
        # Without this: a forked child uses the connections of its parent.
        if self.is_inherited:
            raise ExchangeError(
                f"{op}: the process group was made before this process was forked, and its "
                "connections belong to the parent; start ranks with the methods 'spawn' or "
                "'forkserver', or fork before init_process_group"
            )

    def release(self) -> None:
        self._depth -= 1
        self._lock.release()


class NoLock(GroupLock):
    """The lock in a world of one, which sends nothing: threads need none."""

    def acquire(self, op: str, name: str | None = None) -> None:
        check_name(name)

    def release(self) -> None:
        pass


def check_name(name: str | None) -> None:
    """Raises ValueError unless `name` is None or a string that is not empty."""
    if name is not None and not (isinstance(name, str) and name):
        raise ValueError(f"turn: name must be a string that is not empty, got {name!r}")


_locks: WeakKeyDictionary[dist.ProcessGroup, GroupLock] = WeakKeyDictionary()


def lock_of(group: dist.ProcessGroup) -> GroupLock:
    """The lock that all communicators of `group` share."""
    return _locks.setdefault(group, GroupLock())


def _refuse_inherited_groups() -> None:
    known = list(dist.distributed_c10d._world.pg_map)
    for group in {*known, *_locks}:
        lock_of(group).is_inherited = True


os.register_at_fork(after_in_child=_refuse_inherited_groups)
