# SPDX-License-Identifier: BSD-3-Clause
"""Run a command on several ranks, in real processes with the environment that torchrun gives them.

They come from the fork servers of `distributed`, which have imported what takes a command most of
its time to import.
"""

from __future__ import annotations

import io
import os
import runpy
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NamedTuple

import torch
from torch.distributed import TCPStore

import tree_attention
from distributed import AMPLE_SECONDS, preload, start_process

preload("tree_attention.cli.generate", "tree_attention.hf")
preload("transformers.generation.utils", "transformers.models.llama.modeling_llama")


class Ended(NamedTuple):
    """How a rank has ended."""

    status: int
    stdout: str
    stderr: str


class Ranks:
    """The processes of one command, one a rank."""

    def __init__(self, folder: Path, port: int) -> None:
        self._folder = folder
        self._port = port
        self._processes: list[BaseProcess] = []
        self._num_read: list[int] = []  # characters of the standard output

    def start(
        self, rank: int, program: str, arguments: list[str], environment: dict[str, str], own: bool
    ) -> None:
        outputs = self._outputs(len(self._processes))
        for path in outputs:
            path.touch()
        self._processes.append(
            start_process(rank, _run, program, arguments, environment, own, os.getcwd(), outputs)
        )
        self._num_read.append(0)

    def send(self, number: signal.Signals, *ranks: int) -> None:
        for rank in ranks:
            pid = self._processes[rank].pid
            assert pid is not None
            os.kill(pid, number)

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
        """Returns when a rank has printed `word` after all that was waited for before."""
        stdout, _ = self._outputs(rank)
        while True:
            has_ended = not self._processes[rank].is_alive()
            before, found, _ = stdout.read_text()[self._num_read[rank] :].partition(word)
            if found:
                self._num_read[rank] += len(before + found)
                return
            assert not has_ended, f"rank {rank} has ended and printed only {before!r}"
            time.sleep(0.01)

    def wait_for_end(self, rank: int, seconds: float = AMPLE_SECONDS) -> Ended:
        process = self._processes[rank]
        process.join(seconds)
        stdout, stderr = (path.read_text() for path in self._outputs(rank))
        assert process.exitcode is not None, f"rank {rank} goes on: {stdout!r}, {stderr!r}"
        return Ended(process.exitcode, stdout, stderr)

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()

    def _outputs(self, rank: int) -> tuple[Path, Path]:
        return self._folder / f"stdout-{rank}", self._folder / f"stderr-{rank}"


@contextmanager
def started(
    arguments: Sequence[str],
    world_size: int = 2,
    *,
    only: Sequence[int] | None = None,
    program: str = "",
    own_interpreter: bool = False,
    rank_0_serves: bool = False,
    arguments_of_last: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
) -> Iterator[Ranks]:
    """Starts `python -m tree_attention ARGUMENTS` on every rank, or on those in `only`; `program`
    is the text of another program, and `variables` are further ones of the environment. With
    `own_interpreter` ranks import everything themselves: torch reads the level of its log once. A
    world of 0 is one process without torchrun.

    Whatever is left of them is killed at the end. The store is served by this process, as torchrun
    does, or by rank 0.
    """
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    port = store.port
    if rank_0_serves:
        del store  # which frees its port
    environment = os.environ | {
        "PYTHONPATH": str(Path(tree_attention.__file__).parents[1]),
        **(variables or {}),
    }
    if world_size:
        environment |= {
            "OMP_NUM_THREADS": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            "TORCHELASTIC_USE_AGENT_STORE": str(not rank_0_serves),
        }
    with tempfile.TemporaryDirectory() as folder:
        ranks = Ranks(Path(folder), port)
        try:
            for rank in range(world_size or 1) if only is None else only:
                last = arguments_of_last if rank == world_size - 1 else ()
                own = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if world_size else {}
                command = [*arguments, *last]
                ranks.start(rank, program, command, environment | own, own_interpreter)
            yield ranks
        finally:
            ranks.kill()


def _run(
    program: str, arguments: list[str], environment: dict[str, str], own_interpreter: bool,
    cwd: str, outputs: Sequence[Path],
) -> None:  # fmt: skip
    os.chdir(cwd)  # the server's is that of whichever test came first
    os.environ.clear()
    os.environ.update(environment)
    if "OMP_NUM_THREADS" in environment:  # which the server's OpenMP did not see
        torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    for number, (name, path) in enumerate(zip(("stdout", "stderr"), outputs, strict=True), 1):
        os.dup2(os.open(path, os.O_WRONLY), number)
        # As with PYTHONUNBUFFERED: a test reads along.
        unbuffered = io.FileIO(number, "wb", closefd=False)
        setattr(sys, name, io.TextIOWrapper(unbuffered, write_through=True))
    if own_interpreter:
        assert not program
        # -u and -m in one, as people write them: the package looks at this command.
        os.execv(sys.executable, [sys.executable, "-um", "tree_attention", *arguments])
    sys.argv = ["a command", *arguments]
    if program:
        exec(program, {"__name__": "__main__"})
    else:
        runpy.run_module("tree_attention", run_name="__main__", alter_sys=True)
