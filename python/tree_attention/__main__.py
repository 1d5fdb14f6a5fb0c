# SPDX-License-Identifier: BSD-3-Clause
"""`python -m tree_attention COMMAND`: one file per command in `cli/`, imported when asked for."""

import argparse
import importlib
import os
import sys
from contextlib import suppress
from typing import NoReturn

from ._environment import VariableError
from ._loader import ExtensionError, __version__

try:
    from .cli.usage import INTERRUPTED, UsageError, is_root, report
except ModuleNotFoundError as error:
    sys.exit(f"tree_attention: {error}. Every command needs: pip install numpy rich")

# What a shell reports for a process that Ctrl-C ended: 128 and the number of SIGINT.
INTERRUPTED_STATUS = 130

COMMANDS = {
    "info": "versions, backends and what is unavailable",
    "verify": "check the operators, the ranks and HuggingFace on this machine",
    "generate": "stream text from a checkpoint, its cache sharded over the ranks of torchrun",
    "calibrate": "measure what exchanges cost between the ranks of torchrun",
    "plan": "memory and times of a model on several ranks, by arithmetic",
}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tree_attention",
        description="\n".join(f"  {name:<10} {text}" for name, text in COMMANDS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=__version__)
    parser.add_argument("command", choices=COMMANDS)
    rest = parser.add_argument("arguments", nargs=argparse.REMAINDER, help="see COMMAND --help")
    rest.required = False  # or argparse would say that it is missing together with the command
    parsed = parser.parse_args(arguments)
    try:
        command = importlib.import_module(f"tree_attention.cli.{parsed.command}")
        status = command.main(parsed.arguments)
        sys.stdout.flush()
        return status
    except (UsageError, VariableError) as error:
        report(parsed.command, error)
        return 2
    except RuntimeError as error:
        if not is_of_ranks(error):
            raise
        if INTERRUPTED in str(error):
            return interrupted(parsed.command)
        report(parsed.command, error)
        return 1
    except ExtensionError as error:
        report(parsed.command, error)
        return 1
    except ModuleNotFoundError as error:
        if error.name not in ("numpy", "torch"):
            raise
        report(parsed.command, f"{error.name} is not installed. Run: pip install {error.name}")
        return 1
    except KeyboardInterrupt:
        return interrupted(parsed.command)
    except OSError as error:  # a full disk under the output, say
        report(parsed.command, f"cannot go on: {error}")
        return 1


def is_of_ranks(error: RuntimeError) -> bool:
    """Whether it is an ExchangeError: a command that imports no torch has none."""
    exchange = sys.modules.get("tree_attention.exchange")
    return exchange is not None and isinstance(error, exchange.ExchangeError)


def interrupted(command: str) -> int:
    """Says so once for all ranks, and returns the exit status."""
    if is_root():
        report(command, "interrupted; all ranks end")
    return INTERRUPTED_STATUS


def end(status: int) -> NoReturn:
    """Ends the process."""
    if status == 0:
        sys.exit(0)
    # At once: a thread that still waits in C++ for a lost rank would end in a SIGABRT when Python
    # takes itself down.
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(status)


def console() -> NoReturn:
    """The program `tree-attention`, and `python -m tree_attention`."""
    # Errors are told in sentences, and torch's C++ log would put its stack in front of each that
    # comes of a lost rank. torch reads this once, when a command imports it.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    # Python has none where the shell has closed it, and other files would take its number.
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    # What the terminal's character set lacks is shown by its number, as on stderr.
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    end(main(sys.argv[1:]))


if __name__ == "__main__":
    console()
