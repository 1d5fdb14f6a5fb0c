# SPDX-License-Identifier: BSD-3-Clause
"""Mistakes in the arguments of a command, found before the command does any work, and how the
errors of all commands are told."""

import argparse
import os
import re
import shlex
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console

from .._json import probe_file
from .._paths import did_you_mean
from .rank import is_launched, record_error

# What ranks tell each other of Ctrl-C, inside a call (`Session.before_deadline`) and outside.
INTERRUPTED = f"interrupted by {KeyboardInterrupt()!r}"
# Processes of one job start within seconds, but a cold file system may take minutes to load them.
RENDEZVOUS_SECONDS = 300.0
MAX_PROCESSES = 1 << 20  # of a job
UNFOLDED = 10_000  # columns of a table that is not on a terminal, and that names what users named


_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20}  # of numbers of tokens
A_CHECKPOINT = (
    "directory with config.json, *.safetensors and a tokenizer: `hf download NAME --local-dir DIR` "
    "makes one from the model that the Hugging Face Hub calls NAME"
)


class UsageError(Exception):
    """A mistake of the user; the message says how to put it right."""


def program() -> str:
    """The words that called this process, for lines that a user copies."""
    name = Path(sys.argv[0]).name if sys.argv else ""
    return name if name == "tree-attention" else "python -m tree_attention"


def argument_parser(command: str, description: str, *examples: str) -> argparse.ArgumentParser:
    """The parser of a command; `examples` are what follows the program's name in two or more calls.

    The help of an option is a sentence that names its object, its unit and its default, this as
    "(default: ...)", which scripts/command_line.py reads.
    """
    width = shutil.get_terminal_size().columns - 2
    lines = [f"  {program()} {example}" for example in examples]
    return Parser(
        prog=f"{program()} {command}",
        description=textwrap.fill(description, width),
        epilog="\n".join(["examples:", *lines]),
        formatter_class=argparse.RawDescriptionHelpFormatter,  # leaves examples on their lines
    )


class Parser(argparse.ArgumentParser):
    """Says what is wrong in a sentence: the usage of a command fills a screen above it."""

    _words: Sequence[str] = ()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self._words = args or ()
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        known, near = [*self._option_string_actions], list[str]()
        named = re.findall(r"--[\w-]+", message)
        # The options next to which one is suggested: an unknown one, or a required one for which a
        # similar word was typed.
        if message.startswith("unrecognized arguments"):
            near = [x for word in named for x in get_close_matches(word, known, cutoff=0.7)]
        elif message.startswith("the following arguments are required"):
            typed = [word.partition("=")[0] for word in self._words if word not in known]
            near = [x for word in typed for x in get_close_matches(word, named, cutoff=0.7)]
        elif choice := re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", message):
            near = get_close_matches(choice[1], re.findall(r"[^', ]+", choice[2]))
        way = f"did you mean {near[0]}?" if near else f"see {self.prog} --help"
        _, _, command = self.prog.rpartition(" ")
        sys.exit(end_with(command, f"{message}; {way}", 2))


def tokens_of(option: str, text: str) -> int:
    """Return a number of tokens: 131072, 128k, 1M or 1.5M, of 1,024 and 1,048,576 tokens."""
    # Not above: with it comes numpy, which may be missing, and whose threads get signals of `run`.
    from ..planning.arithmetic import MAX_CONTEXT

    parts = re.fullmatch(r"(\d+(?:\.\d+)?)([km]?)", text.lower())
    tokens = float(parts[1]) * _UNITS[parts[2]] if parts else 0.0
    if not 1 <= tokens <= MAX_CONTEXT or not tokens.is_integer():
        raise UsageError(
            f"{option} must be a whole number of tokens up to {MAX_CONTEXT:,}, such as 131072, "
            f"128k or 1M, got {text!r}"
        )
    return int(tokens)


def add_timeout(parser: argparse.ArgumentParser, what: str = "to answer an exchange") -> None:
    """Adds --timeout to a command, whose ranks have the library's own timeout for `what`."""
    from .._numbers import DEFAULT_TIMEOUT

    default = f"{RENDEZVOUS_SECONDS:g} to start, {DEFAULT_TIMEOUT:g} {what}"
    waits = f"Seconds to wait for another rank to start, or {what} (default: {default})."
    parser.add_argument("--timeout", type=float, metavar="SECONDS", help=waits)


def plain_console(**options: Any) -> Console:
    """A console that prints a text as it is, on one line: what users type is neither markup nor
    emoji codes. Tables, which are folded to a width, are printed with `soft_wrap=False`."""
    return Console(markup=False, emoji=False, highlight=False, soft_wrap=True, **options)


def printable(text: object) -> str:
    """A text with its line breaks and other unprintable characters as escapes."""
    characters = (c if c.isprintable() else ascii(c)[1:-1] for c in str(text))
    return "".join(characters)


def shell_word(path: Path) -> str:
    """A path as a word to copy into a shell, on one line."""
    text = str(path)
    if text.isprintable():
        return shlex.quote(text)
    special = b"\\'"
    characters = (
        chr(x) if 32 <= x < 127 and x not in special else f"\\x{x:02x}" for x in os.fsencode(path)
    )
    return f"$'{''.join(characters)}'"


def end_with(command: str, message: object, status: int) -> int:
    """Says why the command ends, on one line, and returns the exit status. The launcher of a rank
    is told too: torchrun's summary shows it, and `launch` prints it last."""
    is_recorded = record_error(printable(f"{command}: {message}"))
    if not (is_recorded and is_launched()):
        report(command, message)
    return status


def report(command: str, message: object) -> None:
    """Prints a line to stderr."""
    plain_console(stderr=True).print(printable(f"{command}: {message}"), style="red")


def show_cursor() -> None:
    """Shows the cursor, which a bar of progress hides and may leave so where it is cut off."""
    if sys.stderr.isatty():  # and not as rich asks, which FORCE_COLOR answers
        plain_console(stderr=True).show_cursor()


def is_root() -> bool:
    """True where this process talks to the user: rank 0 of torchrun's, or a process alone."""
    return os.environ.get("RANK", "0") == "0"


def check_checkpoint(path: Path) -> None:
    """Raises UsageError where --model names no directory of a checkpoint."""
    if not (path / "config.json").exists():
        meant = "" if path.is_dir() else did_you_mean(str(path))
        raise UsageError(f"no checkpoint in {path}: --model takes a {A_CHECKPOINT}{meant}")


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
    from .._numbers import MAX_SECONDS  # not above: errors of numpy's absence name the command

    if seconds is not None and not 0 < seconds <= MAX_SECONDS:
        raise UsageError(
            f"{option} must be above 0 and at most {MAX_SECONDS:,} seconds, got {seconds:g}"
        )
