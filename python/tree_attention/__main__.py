# SPDX-License-Identifier: BSD-3-Clause
"""`python -m tree_attention COMMAND`: one file per command in `cli/`, imported when asked for."""

import argparse
import importlib
import sys

COMMANDS = {
    "info": "versions, backends and what is unavailable",
    "verify": "check the operators, the ranks and HuggingFace on this machine",
    "generate": "stream text from a checkpoint, its cache sharded over the ranks of torchrun",
    "calibrate": "measure what exchanges cost between the ranks of torchrun",
}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tree_attention",
        description="\n".join(f"  {name:<10} {text}" for name, text in COMMANDS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=COMMANDS)
    rest = parser.add_argument("arguments", nargs=argparse.REMAINDER, help="see COMMAND --help")
    rest.required = False  # or argparse would say that it is missing together with the command
    parsed = parser.parse_args(arguments)
    command = importlib.import_module(f"tree_attention.cli.{parsed.command}")
    return command.main(parsed.arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
