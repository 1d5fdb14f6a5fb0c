# SPDX-License-Identifier: BSD-3-Clause
"""Requests to a driver, and its answers."""

import argparse
import json
import multiprocessing
import random
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

VOCABULARY = 128256
# Tokens of prompts that are generated from before, untimed: of a part of a chunk and of several
# chunks, so that what engines compile for lengths is compiled.
WARM_UP = (256, 5120)
WARM_UP_TOKENS = 4
THREADS = 2


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Generates once and says how long it took.")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("form", help="of the engine")
    parser.add_argument("context", type=int, help="tokens of the prompt")
    parser.add_argument("tokens", type=int, help="new tokens, the first of which ends the prefill")
    return parser.parse_args()


def rounds(asked: argparse.Namespace) -> list[tuple[int, int]]:
    """Lengths of the prompts and numbers of new tokens; the last pair is the one that counts."""
    return [(n, WARM_UP_TOKENS) for n in WARM_UP] + [(asked.context, asked.tokens)]


def longest(asked: argparse.Namespace) -> int:
    return max(context + tokens for context, tokens in rounds(asked))


def prompt(length: int) -> list[int]:
    return random.Random(length).choices(range(VOCABULARY), k=length)


def written(path: Path, write: Callable[..., None], *arguments: Any) -> Path:
    """The path, which `write(path, *arguments)` makes in another process if nothing is there yet.

    In this one it would count as memory of the engine, and a pipeline of OpenVINO behind it has
    ended with a floating point exception.
    """
    if not path.exists():
        partial = path.with_name(f"{path.name}.partial")
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as executor:
            executor.submit(write, partial, *arguments).result()
        partial.rename(path)
    return path


class Arrivals:
    """The new tokens, and the seconds after which each of them came."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.seconds: list[float] = []
        self._begin = time.perf_counter()

    def add(self, token: int) -> None:
        self.seconds.append(time.perf_counter() - self._begin)
        self.tokens.append(token)

    def say(self, engine: str, weights_bytes: int, **others: Any) -> None:
        """Prints the result as the last line of the driver."""
        status = Path("/proc/self/status").read_text().splitlines()
        peak = next(int(line.split()[1]) << 10 for line in status if line.startswith("VmHWM:"))
        result = {
            "engine": engine,
            "seconds": self.seconds,
            "tokens": self.tokens,
            "peak_resident_bytes": peak,
            "weights_bytes": weights_bytes,
            **others,
        }
        print(json.dumps(result), flush=True)
