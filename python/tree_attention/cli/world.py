# SPDX-License-Identifier: BSD-3-Clause
"""The processes that torchrun started, or this one alone."""

import argparse
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from ..exchange import (
    COSTS_VARIABLE,
    Communicator,
    ExchangeError,
    call_before,
    measured_costs,
    ranks_text,
    remaining,
    sentence,
)
from .usage import UsageError, check_seconds, report

# Processes of one job start within seconds, but a cold file system may take minutes to load them.
RENDEZVOUS_SECONDS = 300.0
# What ranks tell each other of Ctrl-C, inside a call (`Session.before_deadline`) and outside.
INTERRUPTED = f"interrupted by {KeyboardInterrupt()!r}"
# After which a rank says for whom it waits.
_SILENT_SECONDS = 10.0
# How long an interrupted rank, which may serve the store, waits for the others to read why.
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


def add_timeout(parser: argparse.ArgumentParser) -> None:
    """The option of commands that leave the time for others to answer to the library."""
    start = f"{RENDEZVOUS_SECONDS:g} to start"
    waits = f"seconds to wait for another rank to start or to answer (default {start})"
    parser.add_argument("--timeout", type=float, help=waits)


def choose_device(name: str) -> torch.device:
    """The device that `--device` names: of GPUs, one for each process of this machine."""
    rank = int(os.environ.get("LOCAL_RANK", 0))
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    num_processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
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
def joined_world(backend: str = "gloo", timeout: float | None = None) -> Iterator[World]:
    """Joins the processes that torchrun describes in the environment to the default process group.

    Each rank also gets its share of the machine's CPUs as threads, because torchrun sets
    OMP_NUM_THREADS to 1 whatever the machine has; any other value of OMP_NUM_THREADS is kept.
    Without torchrun, the world is this process alone. Inside of it, Ctrl-C on one rank ends the
    waits of all. `timeout` is the seconds in which all ranks must come, by default
    `RENDEZVOUS_SECONDS`, and the group's own, by default torch's.
    """
    check_seconds("--timeout", timeout)
    if "RANK" not in os.environ:
        yield World()
        return
    try:
        measured_costs()  # which the first exchange reads
    except ValueError as error:
        raise UsageError(f"{COSTS_VARIABLE}: {error}, or unset {COSTS_VARIABLE}") from error
    names = "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"
    if missing := [name for name in names if name not in os.environ]:
        raise UsageError(
            f"RANK is set without {', '.join(missing)}: start the ranks with torchrun, or unset "
            "RANK to run one process"
        )
    rank, size, local_rank = (int(os.environ[name]) for name in ("RANK", *names[:2]))
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    if os.environ.get("OMP_NUM_THREADS") in (None, "1"):
        usable = getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count() or 1))(0)
        torch.set_num_threads(max(1, len(usable) // local_size))
    if local_size == size and sys.platform == "linux":
        # On one machine, whose host name need not resolve to an address that can be reached.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    _join(rank, size, backend, timeout)
    with _interrupts_passed_on():
        yield World(rank, size, local_rank)
        dist.destroy_process_group()  # not after an error, when it could wait for a lost rank


def _join(rank: int, size: int, backend: str, timeout: float | None) -> None:
    """Makes the default process group once all ranks have come, as torch's own `env://` does, whose
    error would not name the ranks that have not."""
    host, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    agent_serves = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    server = "torchrun" if agent_serves else "rank 0"
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    seconds = RENDEZVOUS_SECONDS if timeout is None else timeout
    begin = time.monotonic()
    deadline = begin + seconds

    def join() -> None:
        store: dist.Store = dist.TCPStore(
            host,
            int(port),
            size,
            is_master=rank == 0 and not agent_serves,
            # Longer than the deadline, whose error names the server.
            timeout=timedelta(seconds=seconds + 1.0),
            wait_for_workers=False,
        )
        store = dist.PrefixStore(f"tree_attention/rendezvous/{attempt}", store)
        keys = [f"{rank}" for rank in range(size)]
        store.set(keys[rank], "")
        for end in (min(deadline, begin + _SILENT_SECONDS), deadline):
            try:
                store.wait(keys, remaining(end))
                break
            except RuntimeError as error:
                missing = ranks_text([rank for rank, x in enumerate(keys) if not store.check([x])])
                if end == deadline:
                    raise ExchangeError(f"no word from {missing}") from error
                wait = f"waits at {host}:{port} for {missing}, {seconds:g} s in all"
                report(f"rank {rank} of {size}", wait)
        dist.init_process_group(
            backend,
            store=store,
            rank=rank,
            world_size=size,
            timeout=None if timeout is None else timedelta(seconds=timeout),
        )

    try:
        # In a thread of its own: Ctrl-C ends the wait for it.
        call_before(deadline, join, who=f"{server}, which serves the rendezvous,")
    except RuntimeError as error:
        raise ExchangeError(
            f"rank {rank} of {size}: the ranks did not meet at {host}:{port}, for which they have "
            f"{seconds:g} s: {sentence(error)}; start all {size} ranks, each within that time"
        ) from error


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
