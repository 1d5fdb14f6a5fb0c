# SPDX-License-Identifier: BSD-3-Clause
"""Hosts of one engine: they meet before vLLM starts, and end together when one of them is lost.

vLLM itself waits for a lost host without an end: its processes sleep until the next request.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ..exchange import DEFAULT_TIMEOUT, sentence

LOG = logging.getLogger("vllm.tree_attention")
MEETING_SECONDS = 30.0  # in which a host has to find the first one; vLLM takes 10 to start
ERROR_SECONDS = 1.0  # in which the others read what was wrong
BEAT_SECONDS = 0.5
LOST_STATUS = 70


def name_of_this() -> str:
    address = os.environ.get("VLLM_HOST_IP")
    return f"{socket.gethostname()} ({address})" if address else socket.gethostname()


def address_towards(host: str, port: int) -> str:
    """The address of this host from which messages to `host` leave, or ValueError."""
    try:
        places = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
        family, kind, protocol, _, address = places[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            found: str = probe.getsockname()[0]
    except OSError as error:
        raise ValueError(
            f"--master-addr must be the name or address of the first host, got {host!r}: "
            f"{error.strerror}"
        ) from None
    return found


def meet(
    host: str,
    port: int,
    node_rank: int,
    nnodes: int,
    note: Mapping[str, object],
    say: Callable[[str], None],
    seconds: float = MEETING_SECONDS,
    start_seconds: float = 600.0,
) -> None:
    """Returns when all `nnodes` hosts came to `host:port` and their notes are equal; raises
    ValueError on each host that can know what is not as it must be."""
    place = f"{host}:{port}"
    try:
        if node_rank > 0:
            _wait_for(host, port, seconds)
        store = _store(host, port, seconds, is_first=node_rank == 0)
    except (RuntimeError, ValueError, OSError) as error:
        if node_rank == 0:
            raise ValueError(
                f"--master-addr and --master-port must be an address of this host and a free port, "
                f"got {place}: {sentence(error)}"
            ) from None
        raise ValueError(
            f"no answer from {place} in {seconds:.0f} s: start --node-rank 0 there first, and "
            f"check --master-addr, --master-port and firewalls"
        ) from None
    try:
        _exchange(store, node_rank, nnodes, note, say, start_seconds)
    except RuntimeError:
        raise ValueError(
            f"the host at {place} left before all were there; its output says why"
        ) from None
    except ValueError as error:
        with suppress(RuntimeError):  # where the store is gone, its host has said why
            store.set("error", str(error))
        if node_rank == 0:  # whose store the others ask
            time.sleep(ERROR_SECONDS)
        raise


def _wait_for(host: str, port: int, seconds: float) -> None:
    """Returns when somebody listens there, or OSError; a store waits for twice its time and more,
    as it lets more and more time pass before it tries again."""
    end = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((host, port), max(0.1, end - time.monotonic())).close()
            return
        except OSError:
            if time.monotonic() > end:
                raise
        time.sleep(0.2)


def _store(host: str, port: int, seconds: float, is_first: bool = False) -> dist.Store:
    """The store at `host:port`, which the first host serves."""
    timeout = timedelta(seconds=seconds)
    return dist.TCPStore(host, port, is_master=is_first, wait_for_workers=False, timeout=timeout)


def _exchange(
    store: dist.Store,
    node_rank: int,
    nnodes: int,
    note: Mapping[str, object],
    say: Callable[[str], None],
    seconds: float,
) -> None:
    """Compares the notes of all hosts with this one's."""
    if store.add(f"host {node_rank}", 1) > 1:
        raise ValueError(
            f"--node-rank must be different on each of {nnodes} hosts, got {node_rank} twice; if "
            "that host was started again, start all of them again"
        )
    address = os.environ.get("VLLM_HOST_IP", "")  # which this host gives the others
    is_alone = address == "::1" or address.startswith("127.")
    mine = {"host": name_of_this(), "is alone": is_alone, **note}
    store.set(f"note {node_rank}", json.dumps(mine))
    for rank in _arrivals(store, "note", nnodes, seconds, say):
        other = json.loads(store.get(f"note {rank}"))
        if node_rank < rank:
            _compare(mine, other, rank)
        else:
            _compare(other, mine, node_rank)
    store.set(f"done {node_rank}", "")
    if node_rank == 0:  # or the notes would be gone
        for _ in _arrivals(store, "done", nnodes, MEETING_SECONDS, say):
            pass


def _arrivals(
    store: dist.Store, what: str, nnodes: int, seconds: float, say: Callable[[str], None]
) -> Iterator[int]:
    """Node ranks, in the order in which their hosts have put `what` into the store."""
    deadline, said, missing = time.monotonic() + seconds, time.monotonic(), list(range(nnodes))
    while True:
        for rank in [rank for rank in missing if store.check([f"{what} {rank}"])]:
            missing.remove(rank)
            yield rank
        if store.check(["error"]):
            raise ValueError(store.get("error").decode())
        if not missing:
            return
        now, names = time.monotonic(), ", ".join(map(str, missing))
        if now > deadline:
            raise ValueError(f"no host with --node-rank {names} came in {seconds:.0f} s")
        if now > said + 10:
            said = now
            say(f"waiting for --node-rank {names} of --nnodes {nnodes}")
        time.sleep(0.05)


def _compare(note: Mapping[str, Any], other: Mapping[str, Any], rank: int) -> None:
    """Raises ValueError where two notes differ, of which the second is of the host `rank`."""
    if note["is alone"] != other["is alone"]:
        alone = note if note["is alone"] else other
        raise ValueError(
            f"VLLM_HOST_IP must be an address that other hosts reach, got {alone['host']}: set it "
            "there, or give --master-addr as an address, as a name may be another one in /etc/hosts"
        )
    for field, value in note.items():
        if field != "host" and other.get(field) != value:
            raise ValueError(
                f"{field} must be equal on all hosts, got {value!r} on {note['host']} and "
                f"{other.get(field)!r} on {other['host']}, --node-rank {rank}"
            )


class Watch(threading.Thread):
    """Counts in a store that this process is alive, and names to `lose` the host of one that was
    silent for `timeout` seconds.

    The store is this thread's alone, as a call of another one would wait for its answer.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world_size: int,
        timeout: float,
        lose: Callable[[str], None],
    ) -> None:
        super().__init__(name="tree_attention watch", daemon=True)
        self._store, self._rank, self._world_size = store, rank, world_size
        self._timeout, self._lose = timeout, lose
        self.names = [f"rank {rank}" for rank in range(world_size)]  # with the host, once known
        self._rounds = 0  # of `_watch_others`
        store.set_timeout(timedelta(seconds=timeout))

    def run(self) -> None:
        """Watches the store's own host, for whose answer a call of the store waits for ever."""
        others = threading.Thread(
            target=self._watch_others, name="tree_attention beats", daemon=True
        )
        others.start()
        seen, silent = -1, 0.0  # seconds in which this process ran, as it may be stopped itself
        while silent <= self._timeout:
            others.join(BEAT_SECONDS)
            if not others.is_alive():
                return
            silent = silent + BEAT_SECONDS if self._rounds == seen else 0.0
            seen = self._rounds
        self._lose(f"{self.names[0]}, gave no sign for {silent:.1f} s")

    def _watch_others(self) -> None:
        ranks, names = range(self._world_size), self.names
        beats = [0] * self._world_size
        last = time.monotonic()
        heard = [last] * self._world_size
        try:
            self._store.set(f"watched {self._rank}", name_of_this())
            while True:
                self._store.add(f"beats {self._rank}", 1)
                now = time.monotonic()
                if now - last > self._timeout / 2:  # this process was stopped, and heard nobody
                    heard = [now] * self._world_size
                last = now
                for rank in ranks:
                    count = self._store.add(f"beats {rank}", 0)
                    if count and not beats[rank]:
                        names[rank] = f"{self._store.get(f'watched {rank}').decode()}, rank {rank}"
                    if count != beats[rank]:
                        beats[rank], heard[rank] = count, now
                silent = [rank for rank in ranks if now - heard[rank] > self._timeout]
                if silent:
                    seconds = now - heard[silent[0]]
                    return self._lose(f"{names[silent[0]]}, gave no sign for {seconds:.1f} s")
                self._rounds += 1
                time.sleep(BEAT_SECONDS)
        except RuntimeError as error:
            self._lose(f"{names[0]}, does not answer: {sentence(error)}")


_watch: Watch | None = None


def watch(parallel_config: Any) -> None:
    """Starts the watch of this process, once."""
    global _watch
    if _watch is not None:
        return
    timeout = float(parallel_config.cpu_distributed_timeout_seconds or DEFAULT_TIMEOUT)
    store = _store(parallel_config.master_addr, parallel_config.master_port, timeout)
    _watch = Watch(store, dist.get_rank(), dist.get_world_size(), timeout, _end_process)
    _watch.start()


def report(error: Exception) -> None:
    """Tells why an exchange failed, and what the hosts of the ranks are, if they are several."""
    if _watch is not None:
        _say_lost(f"{sentence(error)}. The engine has {'; '.join(_watch.names)}")


def _say_lost(why: str) -> None:
    LOG.critical("A host is lost: %s. All processes of the engine end; start it again.", why)


def _end_process(why: str) -> None:
    """Ends this process at once: its main thread may wait for the lost host in C++."""
    _say_lost(why)
    logging.shutdown()
    os._exit(LOST_STATUS)
