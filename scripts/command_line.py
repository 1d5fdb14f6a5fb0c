# SPDX-License-Identifier: BSD-3-Clause
"""Writes the options of every command into docs/command_line.md, from the parsers.

PYTHONPATH=python python scripts/command_line.py
"""

import argparse
import importlib
import re
import sys
from pathlib import Path
from unittest import mock

# Started by its path: `benchmarks` is found from the root of the checkout.
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])

from benchmarks.harness import regions
from tree_attention.__main__ import COMMANDS

PAGE = Path(__file__).parents[1] / "docs/command_line.md"
DEFAULT = r" \(default: ([^)]*)\)"  # in the help of an option


class _Made(Exception):
    """A command has made its parser."""


def parser_of(command: str) -> argparse.ArgumentParser:
    """Return the parser that a command makes before it does anything."""

    def stop(self: argparse.ArgumentParser, *_: object, **__: object) -> None:
        raise _Made(self)

    module = importlib.import_module(f"tree_attention.cli.{command}")
    with (
        mock.patch("sys.argv", ["tree-attention"]),
        mock.patch.multiple(argparse.ArgumentParser, parse_args=stop, parse_intermixed_args=stop),
    ):
        try:
            module.main([])
        except _Made as made:
            return made.args[0]
    raise AssertionError(f"{command} makes no parser")


def cell(text: str) -> str:
    """Return a text as it stands in a table; `<word>` would be HTML."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def row(action: argparse.Action) -> str:
    names = ", ".join(f"`{x}`" for x in action.option_strings) or f"`{action.metavar}`"
    if action.choices is not None:
        values = ", ".join(f"`{x}`" for x in action.choices)
    elif action.nargs == 0 or not action.option_strings:
        values = ""
    else:
        names_of_values = str(action.metavar or action.dest.upper()).split("|")
        values = ", ".join(f"`{cell(x)}`" for x in names_of_values)
    meaning, default = re.sub(DEFAULT, "", action.help or ""), re.search(DEFAULT, action.help or "")
    is_required = action.required and action.nargs != argparse.ZERO_OR_MORE
    shown = "required" if is_required else cell(default[1]) if default else ""
    return f"| {names} | {values} | {shown} | {cell(meaning)} |"


def section(command: str) -> str:
    parser = parser_of(command)
    actions = [x for x in parser._actions if not isinstance(x, argparse._HelpAction)]
    rows = [row(action) for action in actions]
    header = ["| option | value | default | meaning |", "| --- | --- | --- | --- |"]
    examples = re.findall(r"^  (\S.*?)(?: {2,}\(.*\))?$", parser.epilog or "", re.MULTILINE)
    parts = [f"## {command}", " ".join((parser.description or "").split())]
    parts += ["\n".join([*header, *rows])] if rows else []
    parts += ["```sh\n" + "\n".join(examples) + "\n```"]
    return "\n\n".join(parts)


def written(page: str) -> str:
    """Return the page with the sections of today's commands between its marks."""
    sections = "\n\n".join(section(command) for command in COMMANDS)
    return regions.written(page, "scripts/command_line.py", sections)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
