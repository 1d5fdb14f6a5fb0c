# SPDX-License-Identifier: BSD-3-Clause
"""Run a command on several ranks, in real processes that are started as torchrun starts them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from torch.distributed import TCPStore

import tree_attention

# To start, to import torch and transformers, and to end, on a machine with other work.
AMPLE_SECONDS = 90.0


class Ended(NamedTuple):
    """How a rank has ended."""

    status: int
    stdout: str
    stderr: str


class Ranks:
    """The processes of one command, one a rank."""

    def __init__(self, processes: Sequence[subprocess.Popen[str]], port: int) -> None:
        self._processes = processes
        self._port = port

    def send(self, number: signal.Signals, *ranks: int) -> None:
        for rank in ranks:
            self._processes[rank].send_signal(number)

    def wait_for_store(self) -> None:
        """Returns when a rank serves the store."""
        deadline = time.monotonic() + AMPLE_SECONDS
        while True:
            try:
                socket.create_connection(("127.0.0.1", self._port)).close()
                return
            except ConnectionRefusedError:
                assert time.monotonic() < deadline, "no rank serves the store"
                time.sleep(0.05)

    def wait_for_output(self, rank: int, word: str) -> None:
        """Reads what a rank prints until it has printed `word`."""
        stream = self._processes[rank].stdout
        assert stream is not None
        text = ""
        while word not in text:
            char = stream.read(1)
            assert char, f"rank {rank} has ended and printed only {text!r}"
            text += char

    def wait_for_end(self, rank: int, seconds: float = AMPLE_SECONDS) -> Ended:
        stdout, stderr = self._processes[rank].communicate(timeout=seconds)
        return Ended(self._processes[rank].returncode, stdout, stderr)


@contextmanager
def started(
    arguments: Sequence[str],
    world_size: int = 2,
    *,
    only: Sequence[int] | None = None,
    program: Sequence[str] = ("-m", "tree_attention"),
    rank_0_serves: bool = False,
    arguments_of_last: Sequence[str] = (),
    environment: dict[str, str] | None = None,
) -> Iterator[Ranks]:
    """Starts `python -m tree_attention ARGUMENTS` on every rank, or on those in `only`.

    Whatever is left of them is killed at the end. The store is served by this process, as torchrun
    does, or by rank 0.
    """
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    port = store.port
    if rank_0_serves:
        del store  # which frees its port
    package = str(Path(tree_attention.__file__).parents[1])
    base = os.environ | {
        "PYTHONPATH": os.pathsep.join((package, os.environ.get("PYTHONPATH", ""))),
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "TORCHELASTIC_USE_AGENT_STORE": str(not rank_0_serves),
        **(environment or {}),
    }
    processes = []
    try:
        for rank in range(world_size) if only is None else only:
            command = [sys.executable, *program, *arguments]
            if rank == world_size - 1:
                command += arguments_of_last
            processes.append(
                subprocess.Popen(
                    command,
                    env=base | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        yield Ranks(processes, port)
    finally:
        for process in processes:
            process.kill()
            process.communicate()
