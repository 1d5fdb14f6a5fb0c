# SPDX-License-Identifier: BSD-3-Clause
"""Processes of one test run take their ranks from the same servers, whichever of them ends."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from subprocess import PIPE

import pytest

import distributed
from distributed import start_process

pytestmark = pytest.mark.deep

_SECONDS = 60.0


def _tell_server(pipe: Connection) -> None:
    pipe.send(os.getppid())


def take_ranks(folder: str) -> None:
    """For each line of the input, start a rank and print the process that is its server."""
    distributed.share_servers(Path(folder))
    distributed._preloaded.clear()  # torch takes seconds
    for _ in sys.stdin:
        here, there = multiprocessing.Pipe()
        process = start_process(0, _tell_server, there)
        there.close()
        print(here.recv(), flush=True)
        process.join()


class Worker:
    """A process that takes ranks from the servers of `folder`."""

    def __init__(self, folder: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", f"import {__name__} as x; x.take_ranks({str(folder)!r})"],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            stdin=PIPE,
            stdout=PIPE,
            text=True,
            bufsize=1,
        )

    def ask(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")

    def answer(self) -> int:
        assert self.process.stdout is not None
        return int(self.process.stdout.readline())

    def server(self) -> int:
        """The server of a rank that it starts now."""
        self.ask()
        return self.answer()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(_SECONDS)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[], Worker]]:
    with ExitStack() as workers:

        def start() -> Worker:
            worker = Worker(tmp_path)
            workers.enter_context(worker.process)
            workers.callback(worker.process.kill)
            return worker

        yield start


def _wait_for_end(server: int) -> None:
    """A server that has ended keeps its number until its starter asks for it."""
    deadline = time.monotonic() + _SECONDS
    while True:
        try:
            if "\nState:\tZ" in Path(f"/proc/{server}/status").read_text():
                return
        except (FileNotFoundError, ProcessLookupError):
            return
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_second_joins_and_outlives_the_first(start: Callable[[], Worker]) -> None:
    first, second = start(), start()
    server = first.server()
    assert second.server() == server == first.server()
    first.kill()
    assert second.server() == server
    second.kill()
    _wait_for_end(server)
    third, fourth = start(), start()
    own = third.server()
    assert own != server and fourth.server() == own


def _kill(server: int, folder: Path, joined: Worker) -> None:
    os.kill(server, signal.SIGKILL)
    _wait_for_end(server)
    joined.ask()


def _connect_and_send_nothing(server: int, folder: Path, joined: Worker) -> None:
    """As a worker that is killed while it asks for a rank."""
    (address,) = folder.glob("ranks-1-*")
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(address))
    _wait_for_end(server)
    joined.ask()


def _remove_address(server: int, folder: Path, joined: Worker) -> None:
    (address,) = folder.glob("ranks-1-*")
    address.unlink()
    joined.ask()


def _kill_after_the_request(server: int, folder: Path, joined: Worker) -> None:
    os.kill(server, signal.SIGSTOP)
    joined.ask()
    time.sleep(1.0)  # it is most likely waiting for the server then, and need not be
    os.kill(server, signal.SIGKILL)


@pytest.mark.parametrize(
    "end", [_kill, _connect_and_send_nothing, _remove_address, _kill_after_the_request]
)
def test_who_joined_replaces_a_server_that_ended(
    end: Callable[[int, Path, Worker], None], start: Callable[[], Worker], tmp_path: Path
) -> None:
    first, second = start(), start()
    server = first.server()
    assert second.server() == server
    end(server, tmp_path, second)
    own = second.answer()
    assert own != server and second.server() == own
    assert first.server() not in (server, own)  # nor is the starter lost
    assert start().server() not in (server, own)


def test_a_note_that_was_cut_off_is_replaced(start: Callable[[], Worker], tmp_path: Path) -> None:
    (tmp_path / "ranks-1").write_text("[1234, 5")
    first, second = start(), start()
    assert first.server() == second.server()
