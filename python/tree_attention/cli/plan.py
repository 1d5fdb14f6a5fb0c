# SPDX-License-Identifier: BSD-3-Clause
"""`python -m tree_attention plan`: what a model on several ranks keeps and takes, by arithmetic."""

import argparse
import re
import sys
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..exchange import CostTable
from ..planning import tables
from ..planning.arithmetic import Work
from ..planning.machines import LINKS, MACHINES, Hosts, Link, fitted_link, link_of
from ..planning.models import KV_DTYPES
from ..planning.plans import MAX_CONTEXT, MAX_RANKS, Plan, verdicts
from ..planning.reading import NAMES, find_model
from .usage import UsageError

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tree_attention plan",
        description="Memory of a rank, time of a token and time of a prompt for every way to split "
        "a model over ranks, from bandwidths and rounds of messages; nothing is loaded or run.",
    )
    parser.add_argument(
        "--model",
        required=True,
        metavar="DIR|NAME",
        help=f"directory with config.json, or a shape: {', '.join(NAMES)}",
    )
    parser.add_argument("--context", required=True, metavar="TOKENS", help="such as 131072 or 128k")
    parser.add_argument("--ranks", type=int, required=True, metavar="N")
    parser.add_argument(
        "--machine", "--gpu", choices=MACHINES, required=True, help="what every rank runs on"
    )
    link = parser.add_mutually_exclusive_group()
    link.add_argument("--link", choices=LINKS, help="between ranks (default: that of the machine)")
    link.add_argument(
        "--calibration", type=Path, metavar="FILE", help="that `calibrate` wrote, for the link"
    )
    parser.add_argument("--kv-dtype", choices=KV_DTYPES, default="bf16", help="of the cache")
    parser.add_argument(
        "--sequences", type=int, default=1, metavar="N", help="in all, that decode at once"
    )
    parsed = parser.parse_args(arguments)
    show(plan_of(parsed), Console() if sys.stdout.isatty() else Console(width=120))
    return 0


def plan_of(arguments: argparse.Namespace) -> Plan:
    context = tokens_of("--context", arguments.context)
    for option, count in (("--ranks", arguments.ranks), ("--sequences", arguments.sequences)):
        if not 1 <= count <= MAX_RANKS:
            raise UsageError(f"{option} must be 1 to {MAX_RANKS:,}, got {count:,}")
    try:
        model = find_model(arguments.model)
    except ValueError as error:
        raise UsageError(f"--model: {error}") from error
    machine = MACHINES[arguments.machine]
    hosts = Hosts(machine, find_link(arguments, link_of(machine, arguments.ranks)))
    model = replace(model, kv_dtype=arguments.kv_dtype)
    return Plan(model, hosts, arguments.ranks, Work(context, arguments.sequences))


def find_link(arguments: argparse.Namespace, default: str) -> Link:
    if arguments.calibration is None:
        return LINKS[arguments.link or default]
    try:
        costs = CostTable.load(arguments.calibration)
        return fitted_link(costs, arguments.calibration.name)
    except ValueError as error:
        raise UsageError(f"--calibration: {error}") from error


def tokens_of(option: str, text: str) -> int:
    """A number of tokens: 131072, 128k, 1M or 1.5M, of 1,024 and 1,048,576 tokens."""
    parts = re.fullmatch(r"(\d+(?:\.\d+)?)([km]?)", text.lower())
    tokens = float(parts[1]) * _UNITS[parts[2]] if parts else 0.0
    if not 1 <= tokens <= MAX_CONTEXT or not tokens.is_integer():
        raise UsageError(
            f"{option} must be a whole number of tokens up to {MAX_CONTEXT:,}, such as 131072, "
            f"128k or 1M, got {text!r}"
        )
    return int(tokens)


def show(plan: Plan, console: Console) -> None:
    def print_lines(*lines: str) -> None:
        console.print(*lines, sep="\n", markup=False, highlight=False)

    print_lines(tables.title(plan), *tables.sources(plan), "")
    console.print(table(tables.FORMS_HEADINGS, tables.forms(plan)))
    print_lines("", *verdicts(plan))


def table(headings: tuple[str, ...], rows: list[tuple[bool, list[str]]]) -> Table:
    """With some rows in bold."""
    result = Table(box=None, header_style="")
    for i, heading in enumerate(headings):
        result.add_column(heading, justify="left" if i == 0 else "right", no_wrap=i == 0)
    for is_bold, cells in rows:
        result.add_row(*map(Text, cells), style="bold" if is_bold else "")
    return result
