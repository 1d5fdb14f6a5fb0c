# SPDX-License-Identifier: BSD-3-Clause
"""Do all ranks mean the same exchange? They ask through the group's store, never by a collective.

Gloo ends the process when a message is longer than its receiver expects, so shapes are compared
before anything is sent. Each comparison is an *epoch*: every rank publishes its signature under a
key of its own and reads the signatures of all others. A rank whose signature changes opens the next
epoch and waits there, after it has told peers that may have kept theirs
(`Session.announce_change`).
"""

import json
import re
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar

import torch
from torch.distributed import Store

from ..._loader import __version__
from ..notes import Disagreement, ExchangeError, Note, Signature, ranks_text, sentence
from ..transport.deadlines import call_before
from .group_lock import ADVICE

T = TypeVar("T")
# What is wrong with the notes of all ranks, or nothing; the same on every rank.
Judge = Callable[[list[Note]], str]

# The field of a signature that counts the calls in which a rank raised before their messages.
ABANDONED = "abandoned calls"
# The field with the name of each rank's caller.
CALLER = "name of the calling thread"
_FAILED, _NOTE, _HOST = "failed", "note", "host"
_SEPARATOR = "; "
_QUOTE = re.compile(r"rank \d+( \([^)]*\))? has failed: ")
# How long a rank that found a disagreement, and may serve the store, waits for the others' finding.
_PARTING_SECONDS = 2.0
# How long the store may take to pass on what ranks have to say about a failure.
_EXPLAIN_SECONDS = 0.3
_SHORTEST_POLL_SECONDS = 0.0001
_POLL_SECONDS = 0.01


class Agreement:
    """The signatures of a group's ranks, epoch after epoch."""

    def __init__(self, store: Store, rank: int, world_size: int, name: str) -> None:
        self._store, self._name = store, name
        self._rank, self._world_size = rank, world_size
        self._epoch = 0
        self._own: dict[str, str] = {}
        self._hosts = [""] * world_size  # by name, where ranks have told theirs
        self.interrupted = threading.Event()  # ends this rank's wait for the others' signatures

    def reach(
        self,
        signature: Signature,
        deadline: float,
        note: Note | None = None,
        judge: Judge = lambda notes: "",
    ) -> list[Note]:
        """Every rank's note, once all publish the same signature and notes that `judge` finds
        nothing wrong with; or all raise Disagreement, or ExchangeError where they are at different
        steps."""
        self._epoch += 1
        self._own = {
            _NOTE: json.dumps(note or {}),
            _HOST: socket.gethostname(),
            "tree_attention version": __version__,
            # Builds of one release, for CPUs and GPUs, may work together.
            "torch version": torch.__version__.partition("+")[0],
        }
        self._own.update((name, str(value)) for name, value in signature)
        try:
            published = call_before(
                deadline, lambda: self._publish_and_read(deadline), self.interrupted
            )
        except ExchangeError:
            raise
        except RuntimeError as error:
            raise ExchangeError(
                f"the store of the process group is lost: {sentence(error)}"
            ) from error
        known = zip(published, self._hosts, strict=True)
        self._hosts = [said.get(_HOST, host) for said, host in known]
        first = published[0]
        who = self._named([0])
        differences = [self._difference(r, said, first, who) for r, said in enumerate(published)]
        if any(_FAILED in said for said in published):
            raise ExchangeError(_joined(differences))
        notes: list[Note] = [json.loads(said[_NOTE]) for said in published]
        fault = _joined(differences) or judge(notes)
        if fault:
            with suppress(RuntimeError):  # a peer left before it could read: it has its own error
                self._wait_for_readers(min(deadline, time.monotonic() + _PARTING_SECONDS))
            _check_same_step([int(said.get(ABANDONED, 0)) for said in published])
            raise Disagreement(fault)
        return notes

    def withdraw(self, reason: str, patience: float = 0.0) -> str:
        """Tells ranks that come to this epoch or the next why this rank does not.

        Returns what they said in the next until `patience` seconds from now, and who was silent.
        """
        keys = self._keys(self._epoch + 1)
        end = time.monotonic() + patience

        def exchange_reasons() -> str:
            failed = {_FAILED: reason}
            self._store.set(self._keys(self._epoch)[self._rank], json.dumps(self._own | failed))
            self._store.set(keys[self._rank], json.dumps(failed))
            while not self._store.check(keys) and time.monotonic() < end:
                time.sleep(_POLL_SECONDS)
            differences, silent = [], []
            for rank, key in enumerate(keys):
                if not self._store.check([key]):
                    silent.append(rank)
                elif rank != self._rank:
                    said = _parsed(self._store.get(key), rank)
                    differences.append(self._difference(rank, said, self._own, "this rank"))
            told = f"no word from {self._named(silent)}"
            # Where the wait for these ranks is what failed, the reason says so.
            if silent and patience and f"{told} about" not in reason:
                differences.append(told)
            return _joined(differences, known=reason)

        try:
            return call_before(end + _EXPLAIN_SECONDS, exchange_reasons)
        except RuntimeError:  # the store went down with a rank: there is nobody to tell
            return ""

    def _publish_and_read(self, deadline: float) -> list[dict[str, str]]:
        keys = self._keys(self._epoch)
        self._store.set(keys[self._rank], json.dumps(self._own))
        if not self._are_there(keys, deadline):
            missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
            if missing:  # still
                raise ExchangeError(
                    f"no word from {self._named(missing)} about this exchange: lost, stalled, or "
                    "in another"
                )
        values = (
            self._store.multi_get(keys)
            if self._store.has_extended_api()  # type: ignore[attr-defined]
            else [self._store.get(key) for key in keys]
        )
        # Whoever is in this epoch has read the last one, so the store need not keep it.
        self._store.delete_key(self._keys(self._epoch - 1)[self._rank])
        return [_parsed(value, rank) for rank, value in enumerate(values)]

    def _are_there(self, keys: list[str], deadline: float) -> bool:
        """Wait until all keys are in the store; False where the deadline comes first.

        It asks again and again, because `Store.wait` would keep the connection from the process's
        other threads. One of them may have to publish what another rank waits for.
        """
        begin = time.monotonic()
        awaited = [] if self._store.check(keys) else keys
        for key in awaited:  # one after the other, or many ranks would ask for many keys each time
            while not self._store.check([key]):
                now = time.monotonic()
                if now >= deadline or self.interrupted.is_set():
                    return False
                # Back off: 5 % of the time waited so far, 0.1 to 50 ms.
                time.sleep(min(max(_SHORTEST_POLL_SECONDS, 0.05 * (now - begin)), 0.05))
        return True

    def _difference(self, rank: int, said: dict[str, str], other: dict[str, str], who: str) -> str:
        """Sentence about a rank's publication: a difference, a failure, both, or nothing."""
        differences = []
        if {_FAILED} not in (said.keys(), other.keys()):  # each has said what it calls
            for field in _differing(said, other)[:1]:
                theirs, ours = said.get(field), other.get(field)
                advice = f"{_SEPARATOR}{ADVICE}" if field == CALLER else ""
                there = f"on {self._named([rank])}"
                differences.append(f"{field} is {theirs} {there}, {ours} on {who}{advice}")
        if _FAILED in said:
            reason = said[_FAILED]
            # A rank that failed because of others quotes them, and they are named already.
            quotes = _QUOTE.match(reason)
            failed = f"{self._named([rank])} has failed: {reason}"
            differences.append(reason if quotes else failed)
        return ", ".join(differences)

    def _named(self, ranks: Sequence[int]) -> str:
        """Ranks, and where there are several hosts these, which an operator knows."""
        several = len({*self._hosts} - {""}) > 1
        return ranks_text(ranks, self._hosts if several else ())

    def _wait_for_readers(self, deadline: float) -> None:
        """Waits until all ranks have read this epoch."""
        prefix = f"{self._name}/{self._epoch}"

        def wait() -> None:
            if self._store.add(f"{prefix}/readers", 1) == self._world_size:
                self._store.set(f"{prefix}/read", "")
            self._are_there([f"{prefix}/read"], deadline)

        call_before(deadline, wait)

    def _keys(self, epoch: int) -> list[str]:
        return [f"{self._name}/{epoch}/{rank}" for rank in range(self._world_size)]


def _check_same_step(counts: list[int]) -> None:
    """Raises ExchangeError if ranks abandoned different numbers of calls: nobody knows which step
    each of them is at."""
    behind = [rank for rank, count in enumerate(counts) if count == max(counts)]
    others = [rank for rank in range(len(counts)) if rank not in behind]
    if others:
        raise ExchangeError(
            f"{ranks_text(behind)} abandoned more calls before the exchange than "
            f"{ranks_text(others)}; ranks may be at different steps, so start again with a new "
            "process group"
        )


def _parsed(value: bytes, rank: int) -> dict[str, str]:
    """Parse what a rank published. Nothing in it is believed before it is checked."""
    with suppress(ValueError, RecursionError):  # also of bytes that are no UTF-8
        said = json.loads(value)
        if isinstance(said, dict) and all(isinstance(text, str) for text in said.values()):
            int(said.get(ABANDONED, 0))
            if _FAILED in said or isinstance(json.loads(said.get(_NOTE, "")), dict):
                return said
    raise ExchangeError(
        f"the store of the process group holds {value[:40]!r} where rank {rank} publishes what it "
        "calls; something else writes to the store"
    )


def _joined(differences: Sequence[str], known: str = "") -> str:
    """The differences as one text, each once, without the ones that `known` has."""
    parts = dict.fromkeys(part for one in differences for part in one.split(_SEPARATOR) if part)
    return _SEPARATOR.join(part for part in parts if part not in known.split(_SEPARATOR))


def _differing(said: dict[str, str], other: dict[str, str]) -> list[str]:
    fields = [field for field in other | said if field not in (_FAILED, _NOTE, _HOST)]
    return [field for field in fields if said.get(field) != other.get(field)]
