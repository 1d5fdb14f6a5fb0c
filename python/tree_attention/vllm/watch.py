# SPDX-License-Identifier: BSD-3-Clause
"""Ends all hosts of an engine when one of them is lost, or when the first one is asked to end.

vLLM itself waits for a lost host without an end: its processes sleep until the next request.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress

from .hosts import Meeting, while_answered

BEAT_SECONDS = 0.25
# A host that was silent for so long is the one that is lost, where an engine has ended by itself.
# The thread of a host that is there may wait for seconds while an engine uses all processors.
MISSED_SECONDS = 4.0
LOST_STATUS = 70
_END, _TOLD = "end", "told to"  # in the store: why the hosts end


class Watch(threading.Thread):
    """Counts in a store that this host is there, and calls `leave` with an exit status when a host
    was silent for `timeout` seconds, or when another one has said why all of them end.

    The store is this thread's alone, as a call of another one would wait for its answer.
    """

    def __init__(
        self,
        meeting: Meeting,
        timeout: float,
        leave: Callable[[int], object],
        say: Callable[[str], None],
    ) -> None:
        super().__init__(name="tree_attention watch", daemon=True)
        self._meeting, self._timeout, self._leave, self._say = meeting, timeout, leave, say
        self._asked: str | None = None  # what happened to this host's engine, once it has ended
        self.was_told = False  # to end, which may take a while

    def ended(self, *, was_told: bool) -> int:
        """The exit status of this host, once it is known why its engine ended."""
        self._asked = _TOLD if was_told else "it has ended by itself"
        self.join()
        return self._status

    def run(self) -> None:
        first = self._meeting.names[0]
        try:
            why = while_answered(self._beat, self._timeout)
        except TimeoutError:
            why = f"A host is lost: {first}, gave no sign for {self._timeout:.1f} s"
        except Exception as error:
            from ..exchange import sentence

            why = f"A host is lost: {first}, does not answer: {sentence(error)}"
        is_meant = self.was_told or _TOLD in (why, self._asked)
        self._status = 0 if is_meant else LOST_STATUS
        if self._status:
            with suppress(OSError, ValueError):  # where nobody reads it
                self._say(f"{why}. All processes of the engine end; start it again.")
        if self._asked is None:
            self._leave(self._status)

    def _beat(self, answered: Callable[[], None]) -> str:
        """The reason for which the hosts end, as the first host to find it gave it."""
        rank, names, store = self._meeting.rank, self._meeting.names, self._meeting.store
        beats = [0] * len(names)
        last = time.monotonic()
        heard = [last] * len(names)
        asked = 0.0  # when this host's engine had ended
        while True:
            store.add(f"beats {rank}", 1)
            now = time.monotonic()
            if now - last > self._timeout / 2:  # this host was stopped, and heard nobody
                heard = [now] * len(names)
            last = now
            if store.check([_END]):
                return store.get(_END).decode()
            for other in range(len(names)):
                count = store.add(f"beats {other}", 0)
                if count != beats[other]:
                    beats[other], heard[other] = count, now
            lost = min(range(len(names)), key=heard.__getitem__)
            seconds, why = now - heard[lost], ""
            if seconds > (MISSED_SECONDS if asked else self._timeout):
                why = f"A host is lost: {names[lost]}, gave no sign for {seconds:.1f} s"
            elif asked and now - asked > MISSED_SECONDS + 2 * BEAT_SECONDS:
                engine = store.compare_set("first", "", names[rank]).decode()
                why = f"The engine is lost: {engine}, noticed first; the hosts' output says why"
            elif self._asked is not None and not asked:
                asked = now
                if self._asked == _TOLD:
                    why = f"A host is lost: {names[rank]}, was told to end" if rank else _TOLD
                else:
                    store.compare_set("first", "", names[rank])
            if why:
                return store.compare_set(_END, "", why).decode()
            answered()
            time.sleep(BEAT_SECONDS)
