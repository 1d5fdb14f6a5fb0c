# SPDX-License-Identifier: BSD-3-Clause
"""Run a test function on several ranks: a Gloo world of real processes on the loopback interface.

    from distributed import on_ranks, run_ranks

    @on_ranks(3)
    def test_merge(rank, world_size):
        ...assert on every rank...

    def agree(rank, world_size, seed):     # module level: ranks import it by name
        ...assert on every rank...
        return value                       # anything picklable without shared memory

    values = run_ranks(agree, 3, seed)     # [value of rank 0, of rank 1, of rank 2]

Processes come from two fork servers that have imported torch and this library once, one for even
and one for odd ranks, each with a hash seed of its own, as processes of several hosts have. Workers
of pytest-xdist share them.
Processes are kept per world size, so a call costs milliseconds. The default process group is that
world and outlives the call. A failure names world, rank and case, and its processes are replaced.
"""

from __future__ import annotations

import atexit
import fcntl
import functools
import inspect
import json
import multiprocessing
import os
import pickle
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

# A rank that fails leaves its peers inside a collective; they get this long to notice.
_GRACE_SECONDS = 5.0
_START_SECONDS, _EXIT_SECONDS = 240.0, 60.0
# For a process to start, work and end, on a machine with other work.
AMPLE_SECONDS = 600.0
# Ranks compile at their own pace, which the timeout of a call has to allow for.
COMPILING = 600.0
# How many times longer it takes to start an interpreter, and to end one, than a forked process.
_PATIENCE_WITH_INTERPRETERS = 2.0
# Each takes seconds to start and 0.4 GB.
_NUM_SERVERS = 2
# Of process groups that cases leave behind, after which a world is replaced: each has three threads
# of Gloo, one of which polls. With 200 of them the ranks had no time left for the cases.
_MAX_GROUPS = 16


def share_servers(folder: Path) -> None:
    """Have all processes of a run, which name one folder, take ranks from the same servers."""
    global _folder
    _folder = folder


def preload(*modules: str) -> None:
    """Have the fork servers import `modules` too. To be called while test modules are collected."""
    _preloaded.extend(modules)


def start_process(rank: int, fn: Callable[..., Any], *args: Any) -> BaseProcess:
    """Have the fork server of `rank` start a process that calls `fn(*args)` and that Ctrl-C
    interrupts."""
    path = os.environ.get("PYTHONPATH")
    process = _context.Process(target=_call, args=(path, fn, *args), daemon=True)
    try:
        _start(process, _running_server(rank, _folder))
    except (ConnectionError, FileNotFoundError, EOFError):
        # The server has ended. A process that is killed while it asks for a rank ends it for all.
        # To ask whether it lives, by a connection that sends nothing, would end it too.
        del _servers[_hash_seed(rank)]
        _start(process, _running_server(rank, None))
    return process


def _start(process: BaseProcess, server: forkserver.ForkServer) -> None:
    connect = server.connect_to_new_process
    with mock.patch.object(forkserver, "connect_to_new_process", connect):
        process.start()


def _call(path: str | None, fn: Callable[..., Any], *args: Any) -> None:
    os.environ.pop("PYTHONPATH", None)  # the server's
    if path is not None:
        os.environ["PYTHONPATH"] = path
    # A job in the background ignores SIGINT, and whatever it starts inherits that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    fn(*args)


def _hash_seed(rank: int) -> int:
    return rank % _NUM_SERVERS + 1


def _running_server(rank: int, folder: Path | None) -> forkserver.ForkServer:
    """The server of `rank`, which the processes that name `folder` share."""
    seed = _hash_seed(rank)
    if seed not in _servers:
        _servers[seed] = forkserver.ForkServer()
        _servers[seed].set_forkserver_preload(_preloaded)
    # A seed of its own gives sets of strings an order of their own. A test that starts the servers
    # may have set what names a table of costs, which ranks of later tests do not want.
    # What it imports is the same as here, where pytest has added to the path.
    path = os.pathsep.join(sys.path)
    with mock.patch.dict(os.environ, PYTHONHASHSEED=str(seed), PYTHONPATH=path):
        os.environ.pop("TREE_ATTENTION_COSTS", None)
        if folder is None or _servers[seed]._forkserver_address is not None:
            _servers[seed].ensure_running()
        else:
            _start_or_join(_servers[seed], folder, seed)
    return _servers[seed]


def _start_or_join(server: forkserver.ForkServer, folder: Path, seed: int) -> None:
    """Whoever needs a server first starts it, and notes for the others where it is."""
    address = str(folder / f"ranks-{seed}-{os.getpid()}")  # multiprocessing's go with the starter
    with (folder / f"ranks-{seed}").open("a+") as notes:
        fcntl.flock(notes, fcntl.LOCK_EX)
        notes.seek(0)
        if text := notes.read():
            # The starter has ended, or was killed while it wrote.
            with suppress(OSError, ValueError):
                starter, alive, found, key = json.loads(text)
                # The server lives as long as this pipe has a writer.
                server._forkserver_alive_fd = os.open(f"/proc/{starter}/fd/{alive}", os.O_WRONLY)
                server._forkserver_address = found
                server._forkserver_authkey = key and bytes.fromhex(key)
                server.ensure_running = lambda: None  # it is no child of this process
                return
        with mock.patch.object(forkserver.connection, "arbitrary_address", lambda _: address):
            server.ensure_running()
        key = getattr(server, "_forkserver_authkey", None)  # from Python 3.14 on
        notes.truncate(0)
        json.dump((os.getpid(), server._forkserver_alive_fd, address, key and key.hex()), notes)


def _start_interpreter(hash_seed: int, *args: Any) -> BaseProcess:
    process = _interpreters.Process(target=_rank_main, args=args, daemon=True)
    with mock.patch.dict(os.environ, PYTHONHASHSEED=str(hash_seed)):
        process.start()
    return process


class RankFailure(AssertionError):
    """What went wrong on which rank of which world."""


class Lost:
    """Stands for the result of a rank that was expected to be lost."""

    def __repr__(self) -> str:
        return "Lost()"


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 200.0,
    lost: Collection[int] = (),
    fresh: bool = False,
    direct: bool = True,
    hash_seed: int | None = None,
) -> list[Any]:
    """Return `[fn(rank, world_size, *args) for each rank]`, run in `world_size` processes.

    Args:
        fn: function at module level. The default process group is up; torch uses one thread.
        timeout: seconds after which whoever has not answered is killed and reported.
        lost: ranks that are meant to die or stall; they must not answer, the others must.
        fresh: use processes of its own, ended afterwards; implied by `lost`. For tests that leave
            the process group unusable. Survivors must be able to exit by themselves.
        direct: whether messages go by the ways of this library; else through the process group.
        hash_seed: start an interpreter for each rank, with this and the rank as PYTHONHASHSEED: a
            set of strings then has another order on every rank. Takes seconds.

    Raises:
        RankFailure: a rank raised, died, stalled, answered although it was meant to be lost, or
            did not exit when asked. Carries the traceback of every rank concerned.
    """
    own = fresh or bool(lost) or hash_seed is not None
    world = None if own else _worlds.pop(world_size, None)
    if world is None:
        world = _World(world_size, hash_seed)
    done = False
    try:
        results = world.call(fn, args, timeout, frozenset(lost), direct)
        if own:
            world.close(frozenset(lost))
        done = True
    finally:
        if not done:
            world.kill()
    if not own:
        if world.num_groups <= _MAX_GROUPS:
            _worlds[world_size] = world
        else:
            world.kill()
    return results


def on_ranks(
    world_size: int | None = None, **options: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes a test of a function of `rank`, `world_size` and the parameters of the test.

    Without a number, the test has a parameter `world_size`. `options` are those of `run_ranks`.
    """

    def decorate(fn: Callable[..., None]) -> Callable[..., None]:
        _, size, *others = inspect.signature(fn).parameters.values()

        @functools.wraps(fn)
        def test(**arguments: Any) -> None:
            ranks = arguments["world_size"] if world_size is None else world_size
            run_ranks(test, ranks, *(arguments[other.name] for other in others), **options)

        test.on_rank = fn
        test.__signature__ = inspect.Signature([size] * (world_size is None) + others)
        return test

    return decorate


class _World:
    def __init__(self, world_size: int, hash_seed: int | None = None) -> None:
        self.world_size = world_size
        self.patience = 1.0 if hash_seed is None else _PATIENCE_WITH_INTERPRETERS
        self.num_groups = 0  # of a rank, when it last answered
        self.processes: list[BaseProcess] = []
        self.pipes: list[Connection] = []
        for rank in range(world_size if hash_seed is None else 0):
            _running_server(rank, _folder)  # all import at the same time
        for rank in range(world_size):
            ours, theirs = _context.Pipe()
            if hash_seed is None:
                process = start_process(rank, _rank_main, theirs, rank, world_size)
            else:
                process = _start_interpreter(hash_seed + rank, theirs, rank, world_size)
            theirs.close()
            self.processes.append(process)
            self.pipes.append(ours)
        deadline = time.monotonic() + self.patience * _START_SECONDS
        try:
            port = self._receive(0, deadline)  # rank 0 serves the store
            for pipe in self.pipes[1:]:
                pipe.send_bytes(pickle.dumps(port))
            for rank in range(world_size):  # a case may stop a rank, but not amid the rendezvous
                self._receive(rank, deadline)
        except BaseException:
            self.kill()
            raise

    def call(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        timeout: float,
        lost: frozenset[int],
        direct: bool,
    ) -> list[Any]:
        case = f"{fn.__module__}.{fn.__name__}{args!r}"[:300].replace("\n", " ")
        for pipe in self.pipes:
            pipe.send_bytes(pickle.dumps((fn, args, direct)))
        deadline = time.monotonic() + timeout
        results: list[Any] = [Lost() for _ in range(self.world_size)]
        failures: dict[int, str] = {}
        pending = set(range(self.world_size)) - lost
        while pending:
            rank_of = {self.pipes[rank]: rank for rank in pending}
            ready = wait(list(rank_of), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                waited = (
                    f"{_GRACE_SECONDS:g} s after another rank failed"
                    if failures
                    else (f"after {timeout:g} s")
                )
                failures.update(dict.fromkeys(pending, f"no answer {waited}"))
                break
            for pipe in ready:
                rank = rank_of[pipe]
                pending.remove(rank)
                try:
                    ok, value, self.num_groups = pickle.loads(pipe.recv_bytes())
                except EOFError:
                    self.processes[rank].join(_EXIT_SECONDS)
                    ok, value = False, f"process ended, status {self.processes[rank].exitcode}"
                if ok:
                    results[rank] = pickle.loads(value)
                else:
                    failures[rank] = value
                    deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
        for rank in lost:
            if self.pipes[rank].poll():
                try:
                    _, value, _ = pickle.loads(self.pipes[rank].recv_bytes())
                except EOFError:
                    continue  # died, as it was meant to
                failures[rank] = f"was meant to be lost and answered {value!r}"
        if failures:
            raise RankFailure(
                "".join(
                    f"\nrank {rank} of world {self.world_size}, {case}:\n{failures[rank]}"
                    for rank in sorted(failures)
                )
            )
        return results

    def close(self, lost: frozenset[int] = frozenset()) -> None:
        """End the processes; those that are not lost must end by themselves, with status 0."""
        for rank, pipe in enumerate(self.pipes):
            if rank not in lost:
                pipe.close()
        seconds = self.patience * _EXIT_SECONDS
        deadline = time.monotonic() + seconds
        for rank, process in enumerate(self.processes):
            if rank in lost:
                continue
            process.join(max(0.0, deadline - time.monotonic()))
            if process.exitcode != 0:
                raise RankFailure(
                    f"rank {rank} of world {self.world_size}: exit status {process.exitcode} "
                    f"{seconds:g} s after its last case"
                )
        self.kill()

    def kill(self) -> None:
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.kill()
            process.join()

    def _receive(self, rank: int, deadline: float) -> Any:
        if not self.pipes[rank].poll(max(0.0, deadline - time.monotonic())):
            raise RankFailure(f"rank {rank} of world {self.world_size} did not start")
        return pickle.loads(self.pipes[rank].recv_bytes())


def _rank_main(pipe: Connection, rank: int, world_size: int) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    # As pytest's setting in pyproject.toml, which holds for its own process.
    old_name = "`past_key_values` is deprecated"
    warnings.filterwarnings("error", message=old_name, category=FutureWarning)
    if sys.platform == "linux":  # the host name need not resolve to anything reachable
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, world_size, is_master=True, wait_for_workers=False)
        pipe.send_bytes(pickle.dumps(store.port))
    else:
        port = pickle.loads(pipe.recv_bytes())
        store = dist.TCPStore("127.0.0.1", port, world_size, is_master=False)
    # The group keeps torch's default timeout of 30 minutes: shorter deadlines are ours to enforce.
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    pipe.send_bytes(pickle.dumps("ready"))
    while True:
        try:
            request = pipe.recv_bytes()
        except EOFError:
            return
        try:
            fn, args, direct = pickle.loads(request)
            fn = getattr(fn, "on_rank", fn)
            torch.manual_seed(0)  # as before every test; cases may draw more on one rank
            with nullcontext() if direct else through_the_group():
                answer = True, pickle.dumps(fn(rank, world_size, *args))
        except BaseException:  # whatever it was, it is raised again where pytest sees it
            answer = False, traceback.format_exc()
        pipe.send_bytes(pickle.dumps((*answer, len(dist.distributed_c10d._world.pg_map))))


@contextmanager
def through_the_group() -> Iterator[None]:
    """Ranks that set up calls in it use no way to one another but the process group."""
    from tree_attention.exchange.transport.direct import shared_memory, sockets

    with ExitStack() as ways:
        for way in (shared_memory, sockets):
            # No Mock, which would keep the arguments of its calls, and with them the group.
            ways.enter_context(mock.patch.object(way, "connect", lambda *_: "not in this test"))
        yield


def _close_all() -> None:
    while _worlds:
        _worlds.popitem()[1].kill()


_context = multiprocessing.get_context("forkserver")
_interpreters = multiprocessing.get_context("spawn")
_folder: Path | None = None
_preloaded: list[str] = []
_servers: dict[int, forkserver.ForkServer] = {}
preload("torch", "torch.distributed", "pytest", "hypothesis", "tree_attention.decode")
_worlds: dict[int, _World] = {}
atexit.register(_close_all)
