# SPDX-License-Identifier: BSD-3-Clause
"""Mistakes in the arguments of a command, found before the command does any work, and how the
errors of all commands are told."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from .._json import probe_file
from ..exchange import MAX_SECONDS


class UsageError(Exception):
    """A mistake of the user; the message says how to put it right."""


def report(command: str, message: object) -> None:
    """Prints to stderr, on one line, why the command ends."""
    console = Console(stderr=True, highlight=False)
    console.print(f"{command}: {message}", style="red", markup=False, soft_wrap=True)


def is_root() -> bool:
    """True where this process talks to the user: rank 0 of torchrun's, or a process alone."""
    return os.environ.get("RANK", "0") == "0"


def check_can_be_written(option: str, path: Path) -> None:
    """Raises UsageError on the root, which writes, where the file of `option` cannot be created."""
    if not is_root():
        return
    if path.is_dir():
        raise UsageError(f"{option} {path}: this is a directory; name a file")
    if not path.parent.is_dir():
        raise UsageError(f"{option} {path}: there is no directory {path.parent}; create it first")
    with writing(option, path):
        probe_file(path)


@contextmanager
def writing(option: str, path: Path) -> Iterator[None]:
    """Turns errors of writing the file of `option` into a sentence that names both."""
    try:
        yield
    except OSError as error:
        reason = f"this file cannot be written ({error.strerror})"
        raise UsageError(f"{option} {path}: {reason}; name another") from error


def check_seconds(option: str, seconds: float | None) -> None:
    """Raises UsageError unless `seconds`, if given, are a time that can be waited for."""
    if seconds is not None and not 0 < seconds <= MAX_SECONDS:
        raise UsageError(
            f"{option} must be above 0 and at most {MAX_SECONDS:,} seconds, got {seconds:g}"
        )
