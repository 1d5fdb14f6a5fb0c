# SPDX-License-Identifier: BSD-3-Clause
"""`tree-attention COMMAND`, or `python -m tree_attention COMMAND`: one file per command in `cli/`,
imported when asked for."""

import sys

try:
    import argparse
    import importlib
    import os
    from contextlib import suppress
    from typing import NoReturn

    from ._environment import VariableError
    from ._loader import ExtensionError, __version__, has_extension
    from ._memory import is_out_of_memory
    from .cli.rank import INTERRUPTED_STATUS, is_launched
    from .cli.usage import (
        INTERRUPTED,
        Parser,
        UsageError,
        end_with,
        is_root,
        program,
        report,
        show_cursor,
    )
except ModuleNotFoundError as error:
    sys.exit(f"tree_attention: {error}. Every command needs: pip install numpy rich")
except MemoryError:
    sys.exit("tree_attention: this process gets too little memory to begin")
except KeyboardInterrupt:
    sys.exit(130)

COMMANDS = {
    "info": "print versions, backends and what is unavailable",
    "verify": "check the operators, the ranks and HuggingFace's tokens",
    "generate": "stream text from a model whose cache is split over ranks",
    "prepare": "read a document with a model, for ask",
    "ask": "answer questions about a document that prepare read",
    "run": "run a program on several ranks of this machine",
    "doctor": "check this host, and the way to another one, before a job on both",
    "calibrate": "time the exchanges between ranks, for strategy='auto'",
    "plan": "estimate memory and times of a model on several ranks",
}

_NO_MEMORY = "this process gets no more memory: free some, or raise its limit (`ulimit -v`)"


def main(arguments: list[str]) -> int:
    parser = Parser(
        prog=program(),
        description="\n".join(f"  {name:<10} {text}" for name, text in COMMANDS.items()),
        epilog=f"{program()} COMMAND --help lists a command's options and ends with examples.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=__version__)
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help="one of these")
    rest = parser.add_argument("arguments", nargs=argparse.REMAINDER, help="see COMMAND --help")
    rest.required = False  # or argparse would say that it is missing together with the command
    if not arguments:
        parser.print_help()
        return 0
    parsed = parser.parse_args(arguments)
    try:
        command = importlib.import_module(f"tree_attention.cli.{parsed.command}")
        status = command.main(parsed.arguments)
        sys.stdout.flush()
        return status
    except (UsageError, VariableError) as error:
        return end_with(parsed.command, error, 2)
    except RuntimeError as error:
        if not is_of_ranks(error):
            if is_out_of_memory(error):
                _, words, size = str(error).partition("DefaultCPUAllocator: ")
                return end_with(parsed.command, words + size or error, 1)
            raise
        if INTERRUPTED in str(error):
            return interrupted(parsed.command)
        return end_with(parsed.command, error, 1)
    except ExtensionError as error:
        return end_with(parsed.command, error, 1)
    except MemoryError:
        return end_with(parsed.command, _NO_MEMORY, 1)
    except ModuleNotFoundError as error:
        if error.name not in ("numpy", "torch"):
            raise
        missing = f"{error.name} is not installed"
        if error.name == "torch" and not has_extension():  # BUILD_EXTENSION=0: plans alone
            missing += ", and the extension is not built: see Install in README.md"
        else:
            missing += f". Run: pip install {error.name}"
        return end_with(parsed.command, missing, 1)
    except ImportError as error:
        if not is_out_of_memory(error):
            raise
        return end_with(parsed.command, f"{_NO_MEMORY} ({error})", 1)
    except KeyboardInterrupt:
        return interrupted(parsed.command)
    except OSError as error:  # a full disk under the output, say
        return end_with(parsed.command, f"cannot go on: {error}", 1)


def is_of_ranks(error: RuntimeError) -> bool:
    """True for an ExchangeError: a command that imports no torch has none."""
    exchange = sys.modules.get("tree_attention.exchange")
    return exchange is not None and isinstance(error, exchange.ExchangeError)


def interrupted(command: str) -> int:
    """Reports an interrupt once, unless a launcher does, and returns the exit status."""
    if is_root():
        if not is_launched():
            report(command, "interrupted; all ranks end")
        show_cursor()
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
    try:
        status = main(sys.argv[1:])
    except KeyboardInterrupt:  # before a command begins, or while it ends
        status = INTERRUPTED_STATUS
        show_cursor()
    end(status)


if __name__ == "__main__":
    console()
