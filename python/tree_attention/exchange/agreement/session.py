# SPDX-License-Identifier: BSD-3-Clause
"""The ranks of a group in step: they agree before they exchange, return or raise in time, and end
together when one fails."""

import threading
import time
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

from ..notes import Disagreement, ExchangeError, Note, Signature, sentence
from ..transport.deadlines import call_before
from ..transport.messages import OTHER_CALL
from ..transport.process_group import Link
from .self_test import delivery_fault
from .signatures import ABANDONED, Agreement, Judge

T = TypeVar("T")

# Surviving ranks fail at about the same time. How many seconds one that failed waits to hear from
# the others, so that its error can name the ranks that said nothing.
_PATIENCE_SECONDS = 0.3


class Session:
    """A process group whose ranks agree on every call and fail together."""

    def __init__(
        self, group: dist.ProcessGroup, note: Note, on_failure: Callable[[], None], seconds: float
    ) -> None:
        """`note` is for the other ranks to read, and may differ; `on_failure` ends waits elsewhere
        and may come from any thread. A store that does not answer within `seconds` is a failure,
        which the first call reports.
        """
        self.link = Link(group)
        self._here = f"rank {self.link.rank} of {self.link.world_size}"
        self.failed: str | None = None
        self._failing = threading.Lock()
        # What ranks agreed on: the next call need not compare it, if it is equal.
        self.agreed: Signature | None = None
        self.texts: Signature = ()  # of `agreed`, as published
        self._num_abandoned = 0
        self._note, self._on_failure = note, on_failure
        store = group.get_group_store()
        counter, name = f"tree_attention/sessions/{self.link.rank}", ""
        try:
            # Ranks make the sessions of a group in the same order, so its number is the same on all
            # of them. The store counts, as it may outlive a group, and a process that takes a lost
            # one's place has made no session yet.
            number = call_before(time.monotonic() + seconds, lambda: store.add(counter, 1))
            name = f"tree_attention/{number}"
            self.link.use_tags_of(number)
        except RuntimeError as error:
            self.failed = f"the store of the process group is lost: {sentence(error)}"
        self._agreement = Agreement(store, self.link.rank, self.link.world_size, name)

    def agree(self, signature: Signature, deadline: float) -> list[Note]:
        """Every rank's note once all are known to run the same call.

        Called where this rank's signature is not the one that was agreed on, so signatures hold
        nothing that may change on one rank alone without being an error.
        """
        self.agreed = None
        self.announce_change(deadline)
        return self.compare(signature, deadline)

    def announce_change(self, deadline: float) -> None:
        """Tells ranks that may be repeating the last call that this rank makes another one.

        It sends them the messages that they wait for, with the call id OTHER_CALL, on which they
        come to the store. The link does not count these messages.
        """
        self.link.call_id = OTHER_CALL
        with self.link.uncounted():
            # Without this: ranks that repeat the last call wait for this one's messages.
            self.link.replay.run(self.link, deadline)

    def abandon(self) -> None:
        """Records that this rank raised before the messages of a call, which its peers may send.

        Its next call must not be taken for theirs of this step. So the next call compares
        signatures, in which the number of abandoned calls is a field.
        """
        self.agreed = None
        self._num_abandoned += 1

    def compare(
        self,
        signature: Signature,
        deadline: float,
        note: Note | None = None,
        judge: Judge = lambda notes: "",
    ) -> list[Note]:
        """Every rank's note once all have published the same signature (`Agreement.reach`)."""
        signature = ((ABANDONED, self._num_abandoned), *signature)
        return self._agreement.reach(signature, deadline, self._note | (note or {}), judge)

    def test_delivery(self, device: torch.device, deadline: float) -> None:
        """Raises ExchangeError on every rank if messages arrive in a wrong order on any."""
        with self.link.uncounted():
            fault = delivery_fault(self.link, device, deadline)
        try:
            self.compare((("delivery test", fault or "passed"),), deadline)
        except Disagreement as error:  # which ends this communicator, unlike others
            raise ExchangeError(str(error)) from None
        if fault:
            raise ExchangeError(fault)

    def before_deadline(self, run: Callable[[float], T], seconds: float) -> T:
        """`run(deadline)` in so many seconds; any error in it but a disagreement is final."""
        if self.failed is not None:
            raise ExchangeError(f"{self._here}: the communicator has failed before: {self.failed}")
        deadline = time.monotonic() + seconds
        try:
            result = run(deadline)
            if self.failed is not None:
                raise ExchangeError(self.failed)  # aborted as it ended
            return result
        except Disagreement as error:  # known to every rank, and nobody waits: not a failure
            self.agreed = None
            self.link.replay.record(False)
            raise ExchangeError(f"{self._here}: {error}") from None
        except (RuntimeError, ValueError) as error:  # the second of operators
            reason = sentence(error)
            if time.monotonic() >= deadline - 0.005:  # timers count milliseconds
                reason = f"no answer within {seconds:g} s: {reason}"
            self.fail(reason, patience=_PATIENCE_SECONDS)
            raise ExchangeError(f"{self._here}: {self.failed}") from error
        except BaseException as error:
            self.fail(f"interrupted by {error!r}")
            raise

    def fail(self, reason: str, patience: float = 0.0) -> None:
        """Ends the operations under way on this rank, and refuses further calls.

        The other ranks have `patience` seconds to say why they failed.
        """
        self._on_failure()
        with self._failing:
            if self.failed is not None:
                return  # aborted, which is why the call has ended
            self.failed = reason
        self._agreement.interrupted.set()
        self.link.close()
        said = self._agreement.withdraw(reason, patience)
        if said:
            self.failed = f"{reason} ({said})"
