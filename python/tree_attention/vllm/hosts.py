# SPDX-License-Identifier: BSD-3-Clause
"""Hosts of one engine: before vLLM starts they connect to a store and compare their options."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from .. import _network

if TYPE_CHECKING:  # it takes seconds, and `check_early` needs none of it
    import torch.distributed as dist

Found = TypeVar("Found")
MEETING_SECONDS = 30.0  # in which a host has to find the first one; vLLM takes 10 to start
ERROR_SECONDS = 1.0  # in which the others read what was wrong
ASK_SECONDS = 0.05  # between two questions to a store


@dataclass(frozen=True)
class Meeting:
    """The hosts of an engine, and the store through which they watch each other."""

    rank: int
    names: list[str]  # of the hosts, by their ranks
    store: dist.Store


def name_of_this() -> str:
    address = os.environ.get("VLLM_HOST_IP")
    return f"{socket.gethostname()} ({address})" if address else socket.gethostname()


def address_towards(host: str, port: int) -> str:
    """The address of this host from which messages to `host` leave, or ValueError."""
    try:
        return _network.address_towards(host, port)
    except (OSError, UnicodeError) as error:
        raise ValueError(
            f"--master-addr must be the name or address of the first host, got {host!r}: "
            f"{getattr(error, 'strerror', error)}"
        ) from None


def meet(
    host: str,
    port: int,
    node_rank: int,
    nnodes: int,
    note: Mapping[str, object],
    say: Callable[[str], None],
    seconds: float = MEETING_SECONDS,
    start_seconds: float = 600.0,
) -> Meeting:
    """Returns when all `nnodes` hosts have connected to `host:port` and their notes are equal, or
    raises ValueError on each host that can tell what is wrong."""
    place = f"{host}:{port}"

    def run(answered: Callable[[], None]) -> Meeting:
        if node_rank == 0:
            store, watched = (_store(host, p, seconds, is_first=True) for p in (port, 0))
        else:
            _wait_for(host, port, seconds, answered)
            store, watched = _store(host, port, seconds), None
        port_watched = getattr(watched, "port", 0)
        try:
            names, port_watched = _exchange(
                store, port_watched, node_rank, nnodes, note, say, start_seconds, answered
            )
            return Meeting(node_rank, names, watched or _store(host, port_watched, MEETING_SECONDS))
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

    try:
        return while_answered(run, seconds)
    except (RuntimeError, OSError) as error:
        from ..exchange import sentence

        if node_rank == 0:
            raise ValueError(f"the hosts cannot meet at {place}: {sentence(error)}") from None
        raise ValueError(
            f"no answer from {place} in {seconds:.0f} s: start --node-rank 0 there first, and "
            f"check --master-addr, --master-port and firewalls"
        ) from None


def while_answered(run: Callable[[Callable[[], None]], Found], seconds: float) -> Found:
    """The result of `run`, or TimeoutError if `run` has not called its argument for `seconds`: a
    call of a store waits for ever for a host that is stopped."""
    outcomes: list[tuple[Found | None, BaseException | None]] = []
    answers = [0]

    def answered() -> None:
        answers[0] += 1

    def work() -> None:
        try:
            outcomes.append((run(answered), None))
        except Exception as error:
            outcomes.append((None, error))

    thread = threading.Thread(target=work, name="tree_attention hosts", daemon=True)
    thread.start()
    # Seconds in which this process ran, as it may be stopped itself.
    seen, silent, last = -1, 0.0, time.monotonic()
    while silent <= seconds:
        thread.join(ASK_SECONDS)
        if outcomes:
            found, error = outcomes[0]
            if error is not None:
                raise error
            return found  # type: ignore[return-value]
        now = time.monotonic()
        silent = silent + min(now - last, 2 * ASK_SECONDS) if answers[0] == seen else 0.0
        seen, last = answers[0], now
    raise TimeoutError


def check_free(host: str, port: int, name: str, family: int = socket.AF_UNSPEC) -> None:
    """Raises ValueError if nobody can listen at `host:port` of this host."""
    try:
        family, *_, address = socket.getaddrinfo(host, None, family, socket.SOCK_STREAM)[0]
        socket.create_server((address[0], port), family=family).close()
    except (OSError, OverflowError) as error:
        raise ValueError(
            f"{name} must be an address of this host and a free port, got {host}:{port}: "
            f"{getattr(error, 'strerror', error)}"
        ) from None


def _wait_for(host: str, port: int, seconds: float, answered: Callable[[], None]) -> None:
    """Returns when a process listens at `host:port`, or raises OSError. A store would wait for more
    than twice its timeout, because the pauses between its attempts grow."""
    end = time.monotonic() + seconds
    while True:
        answered()
        try:
            socket.create_connection((host, port), max(0.1, end - time.monotonic())).close()
            return
        except OSError:
            if time.monotonic() > end:
                raise
        time.sleep(0.2)


def _store(host: str, port: int, seconds: float, is_first: bool = False) -> dist.Store:
    """The store at `host:port`, which the first host serves."""
    import torch.distributed as dist

    timeout = timedelta(seconds=seconds)
    return dist.TCPStore(host, port, is_master=is_first, wait_for_workers=False, timeout=timeout)


def _exchange(
    store: dist.Store,
    port: int,
    node_rank: int,
    nnodes: int,
    note: Mapping[str, object],
    say: Callable[[str], None],
    seconds: float,
    answered: Callable[[], None],
) -> tuple[list[str], int]:
    """Compares the notes of all hosts with this one's. Returns the hosts' names, and the first
    one's `port`."""
    if store.add(f"host {node_rank}", 1) > 1:
        raise ValueError(
            f"--node-rank must be different on each of {nnodes} hosts, got {node_rank} twice; if "
            "that host was started again, start all of them again"
        )
    address = os.environ.get("VLLM_HOST_IP", "")  # which this host gives the others
    is_loopback = address == "::1" or address.startswith("127.")
    mine = {"host": name_of_this(), "port": port, "is loopback": is_loopback, **note}
    store.set(f"note {node_rank}", json.dumps(mine))
    names = [""] * nnodes
    for rank in _arrivals(store, "note", nnodes, seconds, say, answered):
        other = json.loads(store.get(f"note {rank}"))
        names[rank] = f"{other['host']}, --node-rank {rank}"
        if rank == 0:
            port = other.get("port", 0)  # which another version may lack
        if node_rank < rank:
            _compare(mine, other, rank)
        else:
            _compare(other, mine, node_rank)
    store.set(f"done {node_rank}", "")
    if node_rank == 0:  # or the notes would be gone
        for _ in _arrivals(store, "done", nnodes, MEETING_SECONDS, say, answered):
            pass
    return names, port


def _arrivals(
    store: dist.Store,
    what: str,
    nnodes: int,
    seconds: float,
    say: Callable[[str], None],
    answered: Callable[[], None],
) -> Iterator[int]:
    """Node ranks, in the order in which their hosts have put `what` into the store."""
    deadline, said, missing = time.monotonic() + seconds, time.monotonic(), list(range(nnodes))
    while True:
        for rank in [rank for rank in missing if store.check([f"{what} {rank}"])]:
            missing.remove(rank)
            yield rank
        answered()
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
        time.sleep(ASK_SECONDS)


def _compare(note: Mapping[str, Any], other: Mapping[str, Any], rank: int) -> None:
    """Raises ValueError if `note` differs from `other`, the note of host `rank`."""
    if bool(note.get("is loopback")) != bool(other.get("is loopback")):
        alone = note if note.get("is loopback") else other
        raise ValueError(
            f"VLLM_HOST_IP must be an address that other hosts reach, got {alone['host']}: set it "
            "there, or give --master-addr as an address, as a name may be another one in /etc/hosts"
        )
    for field, value in note.items():
        if field not in ("host", "port", "is loopback") and other.get(field) != value:
            raise ValueError(
                f"{field} must be equal on all hosts, got {value!r} on {note['host']} and "
                f"{other.get(field)!r} on {other['host']}, --node-rank {rank}"
            )
