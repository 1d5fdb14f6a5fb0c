# SPDX-License-Identifier: BSD-3-Clause
"""The processes that torchrun started, or this one alone."""

import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from .._environment import VariableError, read_integer
from ..exchange import (
    Communicator,
    ExchangeError,
    call_before,
    measured_costs,
    ranks_text,
    remaining,
    sentence,
)
from .rank import is_launched
from .usage import (
    INTERRUPTED,
    MAX_PROCESSES,
    RENDEZVOUS_SECONDS,
    UsageError,
    check_seconds,
    report,
)

# Seconds after which a rank reports for whom it waits.
_SILENT_SECONDS = 10.0
# Seconds for which the name of rank 0's host may be unknown: clusters announce new hosts late.
_NAME_SECONDS = 10.0
# Seconds after which a rank looks again whether rank 0 has begun another meeting.
_LOOK_SECONDS = 0.5
_HOST_OF_RANK_0 = "MASTER_ADDR", "the name or the address of rank 0's host"
# Seconds that an interrupted rank, which may serve the store, leaves the others to read why.
_PARTING_SECONDS = 0.5


@dataclass(frozen=True)
class World:
    """This process's place among those that torchrun started."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0  # among the processes on this machine

    @property
    def root(self) -> bool:
        """True where this rank talks to the user."""
        return self.rank == 0


def choose_device(name: str) -> torch.device:
    """The device that `--device` names: of GPUs, one for each process of this machine."""
    num_processes = read_integer("LOCAL_WORLD_SIZE", 1, MAX_PROCESSES, 1)
    rank = read_integer("LOCAL_RANK", 0, num_processes - 1, 0)
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "cpu" or (name == "auto" and num_gpus < num_processes):
        return torch.device("cpu")
    if num_gpus < num_processes:
        raise UsageError(
            f"--device cuda needs a GPU for each process of this machine, which has {num_gpus} for "
            f"{num_processes}: start fewer, or leave --device out; `python -m tree_attention info` "
            "says what torch finds"
        )
    torch.cuda.set_device(rank)
    return torch.device("cuda", rank)


@contextmanager
def joined_world(
    backend: str = "gloo", timeout: float | None = None, group_timeout: float | None = None
) -> Iterator[World]:
    """Joins the processes that torchrun describes in the environment to the default process group.

    Each rank also gets its share of the machine's CPUs as threads, because torchrun sets
    OMP_NUM_THREADS to 1 whatever the machine has; any other value of OMP_NUM_THREADS is kept, and
    the one of our own launcher.
    Without torchrun, the world is this process alone. Inside of it, Ctrl-C on one rank ends the
    waits of all. `timeout` is the seconds in which all ranks must come, by default
    `RENDEZVOUS_SECONDS`; `group_timeout` is that of the group, by default torch's.
    """
    check_seconds("--timeout", timeout)
    if "RANK" not in os.environ:
        yield World()
        return
    measured_costs()  # which the first exchange reads
    names = "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"
    if missing := [name for name in names if name not in os.environ]:
        raise UsageError(
            f"RANK is set without {', '.join(missing)}: start the ranks with torchrun, or unset "
            "RANK to run one process"
        )
    size = read_integer("WORLD_SIZE", 1, MAX_PROCESSES)
    rank = read_integer("RANK", 0, size - 1)
    local_size = read_integer("LOCAL_WORLD_SIZE", 1, size, size)
    local_rank = read_integer("LOCAL_RANK", 0, local_size - 1)
    # Alone, a rank may take any free port.
    address = os.environ["MASTER_ADDR"], read_integer("MASTER_PORT", int(size > 1), (1 << 16) - 1)
    if os.environ.get("OMP_NUM_THREADS") in (None, "1") and not is_launched():
        usable = getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count() or 1))(0)
        torch.set_num_threads(max(1, len(usable) // local_size))
    if local_size == size and sys.platform == "linux":
        # On one machine, whose host name need not resolve to an address that can be reached.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    _join(rank, size, address, backend, timeout, group_timeout)
    with _interrupts_passed_on():
        yield World(rank, size, local_rank)
        dist.destroy_process_group()  # not after an error, when it could wait for a lost rank


def _join(
    rank: int,
    size: int,
    address: tuple[str, int],
    backend: str,
    timeout: float | None,
    group_timeout: float | None,
) -> None:
    """Makes the default process group once all ranks have come, as torch's own `env://` does, whose
    error would not name the ranks that have not."""
    host, port = address
    agent_serves = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    server = "torchrun" if agent_serves else "rank 0"
    seconds = RENDEZVOUS_SECONDS if timeout is None else timeout
    begin = time.monotonic()
    deadline = begin + seconds

    def waits(missing: list[int]) -> None:
        wait = f"waits at {host}:{port} for {ranks_text(missing)}, {seconds:g} s in all"
        report(f"rank {rank} of {size}", wait)

    def join() -> None:
        store: dist.Store = dist.TCPStore(
            host,
            port,
            size,
            is_master=rank == 0 and not agent_serves,
            # Longer than the deadline, whose error names the server.
            timeout=timedelta(seconds=seconds + 1.0),
            wait_for_workers=False,
        )
        store = dist.PrefixStore("tree_attention/rendezvous", store)
        ends = min(deadline, begin + _SILENT_SECONDS), deadline
        meeting = _meet(store, rank, size, ends, waits)
        dist.init_process_group(
            backend,
            store=dist.PrefixStore(meeting, store),
            rank=rank,
            world_size=size,
            timeout=None if group_timeout is None else timedelta(seconds=group_timeout),
        )

    # In threads of their own: Ctrl-C ends the wait for them.
    known = min(deadline, begin + _NAME_SECONDS)
    try:
        call_before(known, lambda: _check_name(host, known))
    except ExchangeError as error:
        raise VariableError(*_HOST_OF_RANK_0, "no name server answers") from error
    try:
        call_before(deadline, join, who=f"{server}, which serves the rendezvous,")
    except RuntimeError as error:
        raise ExchangeError(
            f"rank {rank} of {size}: the ranks did not meet at {host}:{port}, for which they have "
            f"{seconds:g} s: {sentence(error)}; start all {size} ranks (WORLD_SIZE; this one has "
            f"RANK {rank}), each within that time"
        ) from error


def _check_name(host: str, deadline: float) -> None:
    """Raises VariableError unless MASTER_ADDR names a host by the deadline."""
    if not host:
        raise VariableError(*_HOST_OF_RANK_0)
    while True:
        try:
            socket.getaddrinfo(host, None)
            return
        except (OSError, UnicodeError) as error:
            if time.monotonic() + _LOOK_SECONDS >= deadline:
                raise VariableError(*_HOST_OF_RANK_0, sentence(error)) from error
        time.sleep(_LOOK_SECONDS)


def _meet(
    store: dist.Store,
    rank: int,
    size: int,
    ends: tuple[float, float],
    waits: Callable[[list[int]], None],
) -> str:
    """A name that all ranks share and no earlier meeting had, once all of them have come.

    A launcher that starts ranks again leaves the store as it was, and its count of restarts differs
    between hosts (TORCHELASTIC_RESTART_COUNT). So rank 0 names the meeting. The others answer it,
    each with a word of its own that rank 0 repeats: by that they know that its name is new.
    """
    own = secrets.token_hex(8)

    def keys_of(meeting: str) -> list[str]:
        return [f"{meeting}/{rank}" for rank in range(size)]

    def met(meeting: str, until: float) -> bool:
        """True once all ranks have come: rank 0 counts them, and tells the others."""
        keys, everybody = keys_of(meeting), f"{meeting}/all"
        if not came(keys if rank == 0 else [everybody], until):
            return False
        if rank == 0:
            store.set(everybody, b" ".join(store.get(key) for key in keys).decode())
        words = store.get(everybody).decode().split()
        if words[rank : rank + 1] != [own]:  # a meeting that is over
            time.sleep(_LOOK_SECONDS / 10)
            return False
        return True

    def came(keys: list[str], until: float) -> bool:
        try:
            store.wait(keys, remaining(until))
            return True
        except RuntimeError:
            return bool(store.check(keys))  # which says so if the store is lost

    if rank == 0:
        store.set("meeting", own)
    missing = [0]
    for end in ends:
        while time.monotonic() < end and came(["meeting"], end):
            meeting = store.get("meeting").decode()
            store.set(f"{meeting}/{rank}", own)
            if met(meeting, end if rank == 0 else min(end, time.monotonic() + _LOOK_SECONDS)):
                return meeting
            missing = [i for i, key in enumerate(keys_of(meeting)) if not store.check([key])]
        missing = missing or [0]
        if end < ends[-1]:
            waits(missing)
    raise ExchangeError(f"no word from {ranks_text(missing)}")


@contextmanager
def _interrupts_passed_on() -> Iterator[None]:
    """Makes Ctrl-C end this rank's wait for others, and tells them.

    Python raises KeyboardInterrupt between two of its own instructions, to which a thread that
    waits in C++ does not come. So another thread hears of the signal and aborts the exchange.
    """
    reader, writer = socket.socketpair()
    writer.setblocking(False)

    def watch() -> None:
        while number := reader.recv(1):
            if number[0] == signal.SIGINT:
                for comm in list(Communicator.by_name.values()):
                    with suppress(Exception):  # the main thread has the error that counts
                        comm.abort(INTERRUPTED)
                time.sleep(_PARTING_SECONDS)
                return

    thread = threading.Thread(target=watch, name="tree_attention.interrupt", daemon=True)
    thread.start()
    previous = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(previous)
        writer.close()
        thread.join()
        reader.close()
