# SPDX-License-Identifier: BSD-3-Clause
"""The calls of a group's ranks: agreed upon before they run, bounded in time, ended by failure."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.distributed as dist

from .agreement import Agreement, Disagreement, ExchangeError, Note, Signature
from .link import Link
from .self_test import delivery_fault

T = TypeVar("T")

_GIVEN_UP = "calls given up"
# Ranks that are left fail at about the same time: then it shows who does not.
_PATIENCE_SECONDS = 0.3

# Sessions of one group take turns in the same order on all ranks, so a number names them.
_num_sessions: defaultdict[str, int] = defaultdict(int)


class Session(ABC):
    """What a communicator is, whatever it exchanges; a world of one without a group."""

    def __init__(self, group: dist.ProcessGroup | None, timeout: float, note: Note) -> None:
        """`note` is for the other ranks to read, and may differ."""
        self.timeout = timeout
        self.failed: str | None = None
        self._failing = threading.Lock()
        self.rank, self.world_size = 0, 1
        self._agreed: Signature | None = None
        self._tested: set[str] = set()  # kinds of devices
        self._num_given_up = 0
        self._note = note
        if group is not None:
            self.rank, self.world_size = group.rank(), group.size()
            self.link = Link(group)
            # By name and never reset: a store may outlive the group and still hold its keys.
            _num_sessions[group.group_name] += 1
            name = f"tree_attention/{_num_sessions[group.group_name]}"
            store = group.get_group_store()
            self._agreement = Agreement(store, self.rank, self.world_size, name)

    @abstractmethod
    def _constants(self) -> Signature:
        """What must be equal on all ranks in every call."""

    @abstractmethod
    def _learn(self, notes: Sequence[Note]) -> None:
        """Every rank's note, in rank order, once all ranks are known to run the same."""

    def call(
        self,
        signature: Signature,
        run: Callable[[float], T],
        timeout: float | None = None,
        device: torch.device | None = None,
        note: Note | None = None,
    ) -> T:
        """`run(deadline)` once all ranks are known to run the same; any error in it is final.

        Signatures are compared through the store when this rank's differs from its last one, so
        they hold nothing that may change on one rank alone. The first call with tensors of a kind
        of `device`, which the signature names, tests how messages are delivered. `note` is what
        this rank adds to its own.
        """

        def agree_and_run(deadline: float) -> T:
            if signature != self._agreed:
                self._agreed = None
                self._reach(signature, deadline, note)
                if device is not None and device.type not in self._tested:
                    self._test_delivery(device, deadline)
                self._agreed = signature
            try:
                return run(deadline)
            except Disagreement:
                self._agreed = None  # the next call must find it again, before anything is sent
                raise

        return self._until_deadline(agree_and_run, timeout)

    def abort(self, reason: str = "no reason given") -> None:
        """Ends the call under way, which raises ExchangeError, and refuses further ones.

        From any thread, any number of times. Other ranks fail when they wait for this one, and at
        their deadlines otherwise. Over NCCL, what was queued ends with the group's watchdog.
        """
        if self.world_size > 1:
            self._fail(f"aborted: {reason}")

    def agree(self, signature: Signature, timeout: float | None = None) -> None:
        """Raises ExchangeError on every rank, naming rank and field, unless all are equal."""
        if self.world_size > 1:
            self._until_deadline(lambda deadline: self._reach(signature, deadline), timeout)

    def give_up_call(self) -> None:
        """To be told by a rank that stopped on the way to a call.

        Should its peers have gone on, its next call must not meet theirs of this step. So it
        compares signatures, in which the number of calls given up is a field.
        """
        self._agreed = None
        self._num_given_up += 1

    @contextmanager
    def before_call(self) -> Iterator[None]:
        """For what a rank does on the way to a call, which is given up if that raises."""
        try:
            yield
        except BaseException:
            self.give_up_call()
            raise

    def _reach(self, signature: Signature, deadline: float, note: Note | None = None) -> None:
        of_this = ((_GIVEN_UP, self._num_given_up), *self._constants())
        try:
            notes = self._agreement.reach(
                (*signature, *of_this), deadline, self._note | (note or {})
            )
        except Disagreement as error:
            if _GIVEN_UP in error.fields:  # ranks are at different steps, and nobody knows which
                raise ExchangeError(str(error)) from error
            raise
        self._learn(notes)

    def _test_delivery(self, device: torch.device, deadline: float) -> None:
        fault = delivery_fault(self.link.uncounted(), device, deadline)
        try:
            self._agreement.reach((("delivery test", fault or "passed"),), deadline)
        except Disagreement as error:  # which ends this communicator, unlike others
            raise ExchangeError(str(error)) from error
        if fault:
            raise ExchangeError(fault)
        self._tested.add(device.type)

    def _until_deadline(self, run: Callable[[float], T], timeout: float | None) -> T:
        if self.failed is not None:
            raise ExchangeError(
                f"{self._here()}: the communicator has failed before: {self.failed}"
            )
        seconds = self.timeout if timeout is None else timeout
        deadline = time.monotonic() + seconds
        try:
            result = run(deadline)
            if self.failed is not None:
                raise ExchangeError(self.failed)  # aborted as it ended
            return result
        except Disagreement as error:  # known to every rank, and nothing was sent: not a failure
            raise ExchangeError(f"{self._here()}: {error}") from error
        except RuntimeError as error:
            late = time.monotonic() >= deadline - 0.005  # timers count milliseconds
            reason = f"no answer within {seconds:g} s: {error}" if late else str(error)
            self._fail(reason, patience=_PATIENCE_SECONDS)
            raise ExchangeError(f"{self._here()}: {self.failed}") from error
        except BaseException as error:
            self._fail(f"interrupted by {error!r}")
            raise

    def _fail(self, reason: str, patience: float = 0.0) -> None:
        """`patience`: seconds in which the others may say why they failed."""
        with self._failing:
            if self.failed is not None:
                return  # aborted, which is why the call has ended
            self.failed = reason
        self._agreement.interrupt()
        self.link.close()
        said = self._agreement.withdraw(reason, patience)
        if said:
            self.failed = f"{reason} ({said})"

    def _here(self) -> str:
        return f"rank {self.rank} of {self.world_size}"
