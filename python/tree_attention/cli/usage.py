# SPDX-License-Identifier: BSD-3-Clause
"""Mistakes in the arguments of a command, found before the command does any work."""

from pathlib import Path

from rich.console import Console


class UsageError(Exception):
    """A mistake of the user; the message says how to put it right."""


def report(command: str, error: UsageError) -> int:
    """Prints the mistake to stderr and returns the exit status of the command."""
    console = Console(stderr=True, highlight=False)
    console.print(f"{command}: {error}", style="red", markup=False)
    return 2


def check_can_be_written(option: str, path: Path) -> None:
    """Raises UsageError where the file that `option` names cannot be created."""
    if path.is_dir():
        raise UsageError(f"{option} {path}: this is a directory; name a file")
    if not path.parent.is_dir():
        raise UsageError(f"{option} {path}: there is no directory {path.parent}; create it first")
