# SPDX-License-Identifier: BSD-3-Clause
"""The ranks of soak.py as processes: what is done to them, and what they answer."""

from __future__ import annotations

import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .hosts import MASTER_PORT, EmulatedCluster
from .soak_rank import DEADLINE

WORLD = 3
SLACK = 8.0  # seconds beyond the deadline
_STARTING = 120.0
_LATE = 60.0  # seconds after which an error is not waited for any more
# Freed memory goes back to the system at once: what grows is not free.
_ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
STOPPED, SLOW_LINK, CUT_LINK, KILLED = KINDS = ("stopped", "slow link", "cut link", "killed")


@dataclass(frozen=True)
class Fault:
    kind: str
    rank: int
    other: int  # the other end of the link
    after: float  # seconds of undisturbed decoding before
    seconds: float  # for which it lasts, where it is not lethal
    delay: float = 0.0  # seconds, of a slow link


@dataclass
class Outcome:
    """Effect of a fault: seconds until each rank raised, and ranks that did not as they must."""

    fault: Fault
    at: float
    raised: dict[int, float] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)


class Sample(NamedTuple):
    """A measurement of the memory of one rank."""

    seconds: float  # since its job began
    resident: int  # bytes
    groups_lost: int  # before


@dataclass
class Record:
    """Events so far."""

    results: int = 0
    wrong: int = 0
    outcomes: list[Outcome] = field(default_factory=list)
    memory: dict[tuple[int, int], list[Sample]] = field(default_factory=dict)  # by job and rank


class Job:
    """The processes of a world, from their start to the first loss."""

    def __init__(self, cluster: EmulatedCluster, record: Record, number: int, seed: int) -> None:
        self._relay, self._record, self._number = cluster.relay, record, number
        self._usual_delay = cluster.wiring.between.delay
        self._began, self._groups_lost = time.monotonic(), 0
        self._heard: queue.Queue[tuple[float, int, str, str]] = queue.Queue()
        command = [sys.executable, "-m", "lab.emulation.soak_rank", f"{seed} {number}"]
        variables = {"OMP_NUM_THREADS": "1", "MASTER_PORT": str(MASTER_PORT + number), **_ALLOCATOR}
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.processes = [cluster.start(r, command, variables, **pipes) for r in range(WORLD)]
        for rank in range(WORLD):
            threading.Thread(target=self._listen, args=(rank,), daemon=True).start()

    def _listen(self, rank: int) -> None:
        for line in self.processes[rank].stdout or ():
            word, _, rest = line.strip().partition(" ")
            self._heard.put((time.monotonic(), rank, word, rest))
        self._heard.put((time.monotonic(), rank, "ended", ""))

    def wait(
        self, word: str | None, ranks: Iterable[int], seconds: float, since: float | None = None
    ) -> tuple[dict[int, float], dict[int, str]]:
        """Return the seconds after `since` (now) at which each rank said `word`, and others of
        them said instead. Ends when every rank has said either, or after so many seconds."""
        since = time.monotonic() if since is None else since
        waiting, times, instead = set(ranks), {}, {}
        while waiting and (left := since + seconds - time.monotonic()) > 0:
            try:
                at, rank, said, rest = self._heard.get(timeout=left)
            except queue.Empty:
                break
            if said == "done":
                self._count(at, rank, *map(int, rest.split()))
            if rank not in waiting:
                continue
            if said == word and at >= since:
                times[rank] = at - since
                waiting.remove(rank)
            elif said != "done":
                instead[rank] = f"{said} {rest}".strip()
                waiting.remove(rank)
        return times, instead

    def need(self, word: str, seconds: float) -> dict[int, str]:
        """Return what the ranks said that did not say `word` in time; empty where all did."""
        times, instead = self.wait(word, range(WORLD), seconds)
        return {rank: instead.get(rank, "nothing") for rank in range(WORLD) if rank not in times}

    def start_group(self, forms_again: bool = False) -> dict[int, str]:
        """Waits until every rank is in a group; what those said that are not."""
        for process in self.processes if forms_again else ():
            assert process.stdin is not None
            process.stdin.write("again\n")
            process.stdin.flush()
        return self.need("ready", _STARTING)

    def suffer(self, fault: Fault, at: float) -> Outcome:
        """Decodes undisturbed, and then under the fault."""
        outcome = Outcome(fault, round(at, 3))
        _, instead = self.wait(None, range(WORLD), fault.after)
        if instead:
            outcome.failed = {rank: f"{said} (before the fault)" for rank, said in instead.items()}
        elif fault.kind in (CUT_LINK, KILLED):
            self._lose(fault, outcome)
        else:
            self._disturb(fault, outcome)
        return outcome

    def _disturb(self, fault: Fault, outcome: Outcome) -> None:
        if fault.kind == STOPPED:
            self.processes[fault.rank].send_signal(signal.SIGSTOP)
            time.sleep(fault.seconds)
            self.processes[fault.rank].send_signal(signal.SIGCONT)
        else:
            self._relay.delay(fault.rank, fault.other, fault.delay)
            time.sleep(fault.seconds)
            self._relay.delay(fault.rank, fault.other, self._usual_delay)
        for _ in range(2):  # what is said first may count only results from before
            outcome.failed = outcome.failed or self.need("done", DEADLINE + SLACK)

    def _lose(self, fault: Fault, outcome: Outcome) -> None:
        begin, kills = time.monotonic(), fault.kind == KILLED
        if kills:
            self.processes[fault.rank].kill()
        else:
            self._relay.cut(fault.rank, fault.other)
        survivors = [rank for rank in range(WORLD) if not (kills and rank == fault.rank)]
        times, instead = self.wait("error", survivors, DEADLINE + SLACK, begin)
        outcome.raised = {rank: round(seconds, 3) for rank, seconds in times.items()}
        late = [rank for rank in survivors if rank not in times and rank not in instead]
        times, others = self.wait("error", late, _LATE, begin)
        said = {rank: f"an error after {seconds:.2f} s" for rank, seconds in times.items()}
        outcome.failed = dict.fromkeys(late, "nothing") | instead | others | said
        if not kills:
            self._relay.mend(fault.rank, fault.other)
            self._groups_lost += 1
            outcome.failed = outcome.failed or self.start_group(forms_again=True)

    def _count(self, at: float, rank: int, results: int, wrong: int, resident: int) -> None:
        self._record.results += results
        self._record.wrong += wrong
        samples = self._record.memory.setdefault((self._number, rank), [])
        samples.append(Sample(round(at - self._began, 1), resident, self._groups_lost))
