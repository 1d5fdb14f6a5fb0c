# SPDX-License-Identifier: BSD-3-Clause
"""`python -m tree_attention bench decode | tree`: checked timings; wrong results fail."""

import argparse
import importlib
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ..bench import cuda as cuda_bench
from ..bench import report as reports
from .world import World, joined_world


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tree_attention bench",
        description="Times the library beside PyTorch and checks every timed result.",
    )
    commands = parser.add_subparsers(dest="benchmark", required=True)
    decode = commands.add_parser("decode", help="the local operator, in one process")
    tree = commands.add_parser("tree", help="decoding over ranks: torchrun ... bench tree")
    decode.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    decode.add_argument(
        "--budget",
        type=float,
        metavar="SECONDS",
        help="on cuda: begin no case after so long (default 45 with --quick, no limit with "
        "--full, else 120)",
    )
    for command in (decode, tree):
        size = command.add_mutually_exclusive_group()
        size.add_argument("--quick", action="store_true", help="a few tiny cases, to try it")
        size.add_argument("--full", action="store_true", help="every case: minutes")
        command.add_argument("--only", metavar="TEXT", help="cases whose name contains TEXT")
        command.add_argument(
            "--seconds", type=float, default=2.0, help="timed seconds per case (default 2)"
        )
        command.add_argument(
            "--out", type=Path, metavar="DIR", help="write NAME.json, NAME.md and NAME.png there"
        )
    parsed = parser.parse_args(arguments)
    console = Console() if sys.stdout.isatty() else Console(width=180)
    with joined_world() as world:
        if parsed.benchmark == "decode" and world.size > 1:
            if world.root:
                console.print("bench decode runs in one process: start it without torchrun")
            return 2
        return run(parsed, world, console)


def run(arguments: argparse.Namespace, world: World, console: Console) -> int:
    cuda = arguments.benchmark == "decode" and arguments.device == "cuda"
    if cuda and (why := cuda_bench.unavailable()) is not None:
        console.print(f"bench decode --device cuda: {why}", style="red")
        return 2
    name = "cuda.decode" if cuda else arguments.benchmark
    benchmark = importlib.import_module(f"..bench.{name}", __package__)
    if arguments.quick:
        cases = benchmark.quick_cases()
    else:
        cases = benchmark.full_cases() if arguments.full else benchmark.standard_cases()
    if arguments.only:
        chosen = [case for case in cases if arguments.only in case.name]
        if not chosen:
            if world.root:
                console.print(f"No case contains {arguments.only!r}. The cases are:", style="red")
                console.print("\n".join(case.name for case in cases), highlight=False)
            return 2
        cases = chosen
    options: dict[str, float | None]
    if cuda:
        budget = 45.0 if arguments.quick else None if arguments.full else 120.0
        options = {
            "seconds": 0.3 if arguments.quick else arguments.seconds,
            "budget": budget if arguments.budget is None else arguments.budget,
        }
    else:
        options = {
            "seconds": 0.05 if arguments.quick else arguments.seconds,
            "local_rank": world.local_rank,
        }
    with progress_bar(world.root) as progress:
        report = benchmark.run(cases, progress=progress, **options)
    if world.root:
        reports.print_report(console, report)
        if arguments.out is not None:
            paths = reports.write(report, arguments.out)
            console.print("Written: " + ", ".join(map(str, paths)), highlight=False)
        if report.wrong:
            console.print(f"WRONG results: {', '.join(report.wrong)}", style="bold red")
    return 1 if report.wrong else 0


def progress_bar(root: bool) -> Progress:
    return Progress(
        TextColumn("{task.description:<36}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True, quiet=not root),
        transient=True,
    )
