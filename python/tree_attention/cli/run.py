# SPDX-License-Identifier: BSD-3-Clause
"""`tree-attention run -n 2 PROGRAM`: a program on several ranks of this machine."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .._environment import VariableError, read_integer
from . import rank as rank_program
from .usage import UsageError, argument_parser, report, show_cursor

MAX_RANKS = 1024
_MAX_THREADS = 1 << 16
# How long ranks may go on after one has failed, as they may be about to say why themselves, after
# Ctrl-C, as they may be saving something, and after they were told to end.
_FAILED_SECONDS, _INTERRUPTED_SECONDS, _TOLD_SECONDS = 1.0, 10.0, 5.0
_NEVER = float("inf")
_ENDING = {*rank_program.SIGNALS} - {signal.SIGCHLD}


def main(arguments: list[str]) -> int:
    parser = argument_parser(
        "run",
        "Runs a Python program on several ranks of this machine, as torchrun does, with the "
        "processors divided among them. If a rank fails, the others are ended, and the last line "
        "says which rank it was and why; the exit status is that rank's.",
        "run -n 2 chat.py",
        "run -n 2 -m tree_attention verify",
    )
    parser.add_argument(
        "-n",
        "--ranks",
        type=int,
        required=True,
        metavar="N",
        help="Number of ranks, each a process that is started on this machine.",
    )
    parser.add_argument(
        "-m",
        "--module",
        action="store_true",
        help="Take PROGRAM as the name of a module, as `python -m` does.",
    )
    parser.add_argument("program", metavar="PROGRAM", help="Python file that every rank runs.")
    rest = parser.add_argument(
        "arguments", nargs="...", metavar="ARGUMENTS", help="Arguments of the program."
    )
    rest.required = False
    parsed = parser.parse_args(arguments)
    check_ranks("-n", parsed.ranks)
    if not parsed.module and not os.path.exists(parsed.program):
        raise UsageError(
            f"{parsed.program}: there is no such file; name a Python program, or with -m a module"
        )
    words = [*["-m"] * parsed.module, parsed.program, *parsed.arguments]
    return launch("run", parsed.ranks, words)


def check_ranks(option: str, number: int) -> None:
    """Raises UsageError unless so many ranks can be started here."""
    if not 1 <= number <= MAX_RANKS:
        raise UsageError(f"{option} must be 1 to {MAX_RANKS:,} ranks of this machine, got {number}")


@dataclass
class Rank:
    """A process, and what is known of its end."""

    number: int
    process: "subprocess.Popen[bytes]"
    error_file: Path
    ended: float = _NEVER  # seconds of `time.time`
    is_told: bool = False  # to end

    def look(self) -> bool:
        """True while it runs."""
        if self.ended == _NEVER and self.process.poll() is not None:
            self.ended = time.time()
        return self.ended == _NEVER

    @property
    def has_failed(self) -> bool:
        """True if the rank has ended by itself with an error."""
        return self.process.returncode not in (None, 0) and not (
            self.is_told and self.process.returncode < 0
        )

    def error(self) -> Mapping[str, Any] | None:
        """The error that it has recorded."""
        try:
            content: Mapping[str, Any] = json.loads(self.error_file.read_text("utf-8"))["message"]
            return content
        except (OSError, ValueError, KeyError):
            return None

    @property
    def failed_at(self) -> tuple[bool, float]:
        """Sorts ranks by which failed first. A rank that was killed comes before others, because it
        reports nothing, and ranks that miss it may report that quickly."""
        was_killed = self.process.returncode < 0
        error = self.error() or {}
        return not was_killed, float(error.get("extraInfo", {}).get("time", self.ended))

    @property
    def status(self) -> int:
        code = self.process.returncode
        return code if code >= 0 else 128 - code


def launch(command: str, num_ranks: int, words: Sequence[str]) -> int:
    """Runs `python WORDS` on ranks of this machine until all have ended, and returns the first
    failure's exit status, after a sentence that begins with `command` says what it was.

    Ctrl-C, SIGTERM and SIGHUP go on to the ranks, and are no failures.

    Raises:
        UsageError, VariableError: the environment does not allow it.
    """
    environment = _environment(command, num_ranks)
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, rank_program.SIGNALS)
    ranks: list[Rank] = []
    try:
        with tempfile.TemporaryDirectory(prefix="tree_attention_") as folder:
            try:
                for number in range(num_ranks):
                    file = Path(folder) / f"{number}.json"
                    ranks.append(_start(number, words, environment, file))
                ended_by = _watch(ranks)
            finally:
                for rank in ranks:
                    rank.process.kill()
                    rank.process.wait()
            # A bar of progress hides the cursor, and whoever is killed leaves it hidden.
            if any(rank.process.returncode < 0 for rank in ranks):
                show_cursor()
            if ended_by is not None:
                return 128 + ended_by
            failed = [rank for rank in ranks if rank.has_failed]
            if not failed:
                return 0
            first = min(failed, key=lambda rank: rank.failed_at)
            _tell(command, first, num_ranks)
            return first.status
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _environment(command: str, num_ranks: int) -> dict[str, str]:
    """The environment of all ranks: a meeting point on the loopback device, and a part of the
    processors. What the user has set stays."""
    if "RANK" in os.environ:
        raise UsageError(
            f"RANK is set, as torchrun and {command} set it for the ranks that they start: run it "
            "outside of them, or unset RANK"
        )
    each = max(1, len(os.sched_getaffinity(0)) // num_ranks)
    threads = read_integer("OMP_NUM_THREADS", 1, _MAX_THREADS, each)
    address = os.environ.get("MASTER_ADDR", "127.0.0.1")
    port = read_integer("MASTER_PORT", 0, (1 << 16) - 1, 0)
    try:
        family, *_, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        with socket.create_server((place[0], 0), family=family):
            pass
    except (OSError, UnicodeError) as error:
        number = getattr(error, "errno", 0) or 0  # errors of names have numbers below 0
        why = os.strerror(number) if number > 0 else str(error)
        raise VariableError("MASTER_ADDR", "unset, or an address of this machine", why) from error
    try:
        with socket.create_server((place[0], port), family=family) as server:
            port = server.getsockname()[1]  # which rank 0 takes a moment later
    except OSError as error:
        why = os.strerror(error.errno or 0)
        raise VariableError("MASTER_PORT", "unset, or a free port of this machine", why) from error
    # An agent of torchrun's, should one be above, serves no store here.
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TORCHELASTIC_")}
    # The host's own name need not lead to an address that can be reached.
    environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # What torch's C++ says of a lost rank would stand in front of the sentence.
    environment.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    return environment | {
        "OMP_NUM_THREADS": str(threads),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        rank_program.LAUNCHER: str(os.getpid()),
    }


def _start(
    number: int, words: Sequence[str], environment: Mapping[str, str], error_file: Path
) -> Rank:
    own = {"RANK": str(number), "LOCAL_RANK": str(number)}
    process = subprocess.Popen(
        [sys.executable, rank_program.__file__, *words],
        env={**environment, **own, rank_program.ERROR_FILE: str(error_file)},
        stdin=None if number == 0 else subprocess.DEVNULL,
    )
    return Rank(number, process, error_file)


def _watch(ranks: Sequence[Rank]) -> signal.Signals | None:
    """Waits for all ranks to end, in bounded time after a failure or a signal; returns the signal
    that ended them, if one did."""
    ended_by: signal.Signals | None = None
    deadline, next_signal = _NEVER, signal.SIGTERM
    while [rank for rank in ranks if rank.look()]:
        now = time.monotonic()
        if now >= deadline:
            _send(ranks, next_signal)
            deadline, next_signal = now + _TOLD_SECONDS, signal.SIGKILL
        if deadline == _NEVER and any(rank.has_failed for rank in ranks):
            deadline = now + _FAILED_SECONDS
        # SIGCHLD ends the wait early. What it returns is not looked at: after a stop (Ctrl-Z, fg)
        # that lasted longer than the wait, it is what happened to be in memory.
        signal.sigtimedwait((signal.SIGCHLD,), min(0.1, max(0.0, deadline - now)))
        asked = signal.sigpending() & _ENDING
        if not asked:
            continue
        got = signal.sigwaitinfo(asked)
        number = signal.Signals(got.si_signo)
        if ended_by is not None:  # somebody does not want to wait
            _send(ranks, signal.SIGKILL)
            continue
        ended_by = number
        deadline = now + _INTERRUPTED_SECONDS
        # A terminal sends Ctrl-C to the ranks as well, and has no process id.
        if number != signal.SIGINT or got.si_pid:
            _send(ranks, number)
    return ended_by


def _send(ranks: Sequence[Rank], number: signal.Signals) -> None:
    for rank in ranks:
        if rank.look():
            rank.is_told = True
            with suppress(ProcessLookupError):
                rank.process.send_signal(number)


def _tell(command: str, rank: Rank, num_ranks: int) -> None:
    """Prints why a rank failed: its traceback, if it has one, and one sentence."""
    error, named = rank.error(), f"rank {rank.number} of {num_ranks}"
    if error is not None:
        details = error.get("extraInfo", {})
        sentence = str(error.get("message"))
        # One that torch's `record` wrote, too, is a traceback.
        if details.get("is_traceback", "True") == "True":
            sys.stderr.write(str(details.get("py_callstack", "")).rstrip() + "\n")
            sys.stderr.flush()
        said = sentence.partition("\n")[0].removeprefix(f"{command}: ")
        is_of_torch = "is_traceback" not in details
        report(command, f"{named}: {said}" if is_of_torch else said)
    elif rank.process.returncode < 0:
        number = f"signal {-rank.process.returncode}"  # some have no name
        with suppress(ValueError):
            number = signal.Signals(-rank.process.returncode).name
        memory = ", as the system does where memory runs out" * (number == "SIGKILL")
        report(command, f"{named} was ended by {number}{memory}")
    else:
        report(command, f"{named} ended with exit status {rank.process.returncode}")
