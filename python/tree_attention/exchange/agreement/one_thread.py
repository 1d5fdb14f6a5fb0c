# SPDX-License-Identifier: BSD-3-Clause
"""One thread at a time, of the process that made it: who may use a process group.

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


class Turn:
    """The right to use a process group, which one thread has for the length of a call."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._depth = 0
        self._holder = "", ""  # function and thread, of the outermost
        self._name: str | None = None
        # Threads that had the turn, by their names.
        self._threads: WeakValueDictionary[str, threading.Thread] = WeakValueDictionary()
        self.is_inherited = False  # from the process that this one was forked from

    @property
    def name(self) -> str:
        """Name of the caller, which ranks compare: that of its thread, unless it gave another."""
        return self._holder[1] if self._name is None else f"{self._name} of Communicator.turn"

    def take(self, op: str, name: str | None = None) -> None:
        """Takes the turn for `op`, as often as the thread likes, and each time to be given back.

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
        if self.is_inherited:
            raise ExchangeError(
                f"{op}: the process group was made before this process was forked, and its "
                "connections belong to the parent; start ranks with the methods 'spawn' or "
                "'forkserver', or fork before init_process_group"
            )

    def give_back(self) -> None:
        self._depth -= 1
        self._lock.release()


class NoTurns(Turn):
    """The turn in a world of one, which sends nothing: threads need none."""

    def take(self, op: str, name: str | None = None) -> None:
        check_name(name)

    def give_back(self) -> None:
        pass


def check_name(name: str | None) -> None:
    """Raises ValueError unless it is None or a string that is not empty."""
    if name is not None and not (isinstance(name, str) and name):
        raise ValueError(f"turn: name must be a string that is not empty, got {name!r}")


_turns: WeakKeyDictionary[dist.ProcessGroup, Turn] = WeakKeyDictionary()


def turn_of(group: dist.ProcessGroup) -> Turn:
    """The turn of all communicators of `group`."""
    return _turns.setdefault(group, Turn())


def _refuse_inherited_groups() -> None:
    known = list(dist.distributed_c10d._world.pg_map)
    for group in {*known, *_turns}:
        turn_of(group).is_inherited = True


os.register_at_fork(after_in_child=_refuse_inherited_groups)
