# SPDX-License-Identifier: BSD-3-Clause
"""The relay: the program in relay.cpp, compiled when it is needed, and what one can tell it."""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from .wiring import Wiring

SOURCES = Path(__file__).parent
BUILD = SOURCES.parents[1] / "build" / "emulation"
FLAGS = ("-std=c++20", "-O2", "-Wall", "-Wextra", "-pthread")
# Jumbo frames: packets are what costs time here, and big machines' networks have them too.
MTU = 9000


def compile_program(source: Path, include: Path = SOURCES) -> Path:
    """The program of one file and the headers of this folder, made anew when any has changed."""
    compiler = os.environ.get("CXX", "g++")
    texts = [source.read_bytes(), *(path.read_bytes() for path in sorted(SOURCES.glob("*.h")))]
    digest = hashlib.sha256(b"\0".join([*texts, " ".join((compiler, *FLAGS)).encode()]))
    program = BUILD / f"{source.stem}-{digest.hexdigest()[:16]}"
    if not program.exists():
        BUILD.mkdir(parents=True, exist_ok=True)
        unfinished = program.with_suffix(f".{os.getpid()}")
        command = [compiler, *FLAGS, f"-I{include}", str(source), "-o", str(unfinished)]
        subprocess.run(command, check=True)
        unfinished.replace(program)
    return program


class Relay:
    """Carries the packets of a network while it runs. It ends with this process."""

    def __init__(self, wiring: Wiring, namespaces: Sequence[Path]) -> None:
        near = (wiring.inside or wiring.between).delay
        numbers = (MTU, wiring.per_node, near, wiring.between.delay)
        self._process = subprocess.Popen(
            [compile_program(SOURCES / "relay.cpp"), *map(str, numbers), *map(str, namespaces)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for those who use the network
        )
        self._expect("ready")

    def cut(self, a: int, b: int) -> None:
        """No packet arrives any more, until it is mended."""
        self._tell(f"cut {a} {b}")

    def mend(self, a: int, b: int) -> None:
        self._tell(f"mend {a} {b}")

    def lose(self, a: int, b: int, probability: float) -> None:
        """Loses each packet between two hosts with this probability."""
        self._tell(f"loss {a} {b} {probability}")

    def delay(self, a: int, b: int, seconds: float) -> None:
        """One way; packets under way keep theirs."""
        self._tell(f"delay {a} {b} {seconds}")

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def _tell(self, command: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        self._expect("ok")

    def _expect(self, answer: str) -> None:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        if not line:
            raise RuntimeError(f"the relay ended with status {self._process.wait()}")
        if line != answer:
            raise ValueError(line)
