# SPDX-License-Identifier: BSD-3-Clause
"""Options, the choice of cases, a progress bar and the report's way out, for all programs."""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tree_attention.cli.usage import plain_console, printable
from tree_attention.cli.world import World

from .report import Report, print_report, write
from .shapes import Named

AnyCase = TypeVar("AnyCase", bound=Named)
CaseList = Callable[[], Sequence[AnyCase]]


def parser_of_cases(description: str) -> argparse.ArgumentParser:
    """The options of a program that times a list of cases."""
    parser = argparse.ArgumentParser(description=description)
    size = parser.add_mutually_exclusive_group()
    _add_quick(size)
    size.add_argument("--full", action="store_true", help="every case: minutes")
    parser.add_argument(
        "--only", nargs="+", metavar="TEXT", help="cases whose name contains one of these"
    )
    _add_seconds(parser, 2.0)
    add_out(parser)
    return parser


def add_quick(parser: argparse.ArgumentParser, seconds: float) -> None:
    """The options of a program whose cases are a few, or fewer and tiny."""
    _add_quick(parser)
    _add_seconds(parser, seconds)


def _add_quick(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("--quick", action="store_true", help="a few tiny cases, to try it")


def _add_seconds(parser: argparse.ArgumentParser, seconds: float) -> None:
    text = f"timed seconds per case (default {seconds:g})"
    parser.add_argument("--seconds", type=float, default=seconds, help=text)


def parser_of(documentation: str | None, name: str) -> argparse.ArgumentParser:
    """The options of a program that writes the report `name`; it is described by the first
    paragraph of its documentation."""
    parser = argparse.ArgumentParser(description=(documentation or "").split("\n\n")[0])
    add_out(parser, name)
    return parser


def add_out(parser: argparse.ArgumentParser, name: str = "NAME") -> None:
    parser.add_argument("--out", type=Path, metavar="DIR", help=f"write {name}.md there")


def add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="cpu (default, Gloo) or cuda (NCCL)",
    )


def check_device(parser: argparse.ArgumentParser, device: str) -> None:
    """Ends the program with a sentence where there is no such device."""
    if device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no CUDA driver or no device")


def run_cases(
    parsed: argparse.Namespace,
    world: World,
    lists: tuple[CaseList[AnyCase], CaseList[AnyCase], CaseList[AnyCase]],
    run: Callable[[Sequence[AnyCase], Progress], Report],
) -> int:
    """Runs the cases that the options ask for, of those for --quick, by default and for --full.

    Collective where the world has several ranks; returns the exit status.
    """
    quick, standard, full = lists
    cases = (quick if parsed.quick else full if parsed.full else standard)()
    if parsed.only:
        chosen = [case for case in cases if any(text in case.name for text in parsed.only)]
        if not chosen:
            if world.root:
                console = console_of()
                texts = " or ".join(map(repr, parsed.only))
                console.print(f"No case contains {texts}. The cases are:", style="red")
                console.print("\n".join(case.name for case in cases))
            return 2
        cases = chosen
    with progress_bar(world.root) as progress:
        report = run(cases, progress)
    return finish(report, parsed.out) if world.root else int(bool(report.wrong))


def finish(report: Report, out: Path | None, width: int = 180) -> int:
    """Prints the report, writes its files to `out` and returns the exit status: 1 if it is wrong.

    `width`: of the table in columns of text, where no terminal limits it.
    """
    console = console_of(width)
    print_report(console, report)
    if out is not None:
        console.print("Written: " + ", ".join(map(printable, write(report, out))))
    if report.wrong:
        console.print(f"WRONG results: {', '.join(report.wrong)}", style="bold red")
    return 1 if report.wrong else 0


def console_of(width: int = 180) -> Console:
    return plain_console(width=None if sys.stdout.isatty() else width)


def shown(progress: Progress, cases: Sequence[AnyCase]) -> Iterator[AnyCase]:
    """The cases in turn; the bar names the one that runs."""
    task = progress.add_task("", total=len(cases))
    for case in cases:
        progress.update(task, description=case.name)
        yield case
        progress.advance(task)


def progress_bar(root: bool) -> Progress:
    return Progress(
        TextColumn("{task.description:<36}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True, quiet=not root),
        transient=True,
    )
