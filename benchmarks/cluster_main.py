# SPDX-License-Identifier: BSD-3-Clause
"""What the programs for emulated clusters share: options, and one configuration after another.

A configuration is LINK/RANKS. Its part of the report is kept in the JSON file, where a later run of
other configurations finds it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from tree_attention.bench.report import Report, print_report, write

from .cluster import exit_on_sigterm, unsupported
from .cluster_run import load_parts


def configurations(links: Sequence[str], worlds: Sequence[int]) -> list[str]:
    return [f"{link}/{world}" for link in links for world in worlds]


def parser_of(report: str, names: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.bench_{report}")
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="LINK/RANKS")
    files = f"{report}.{{json,md,png}}"
    parser.add_argument("--out", type=Path, metavar="DIR", help=f"write {files} there")
    return parser


def measure(
    report: str,
    names: Sequence[str],
    parsed: argparse.Namespace,
    run: Callable[[str, int], dict[str, Any]],
    report_of: Callable[[dict[str, Any]], Report],
    width: int = 180,
) -> int:
    """`run(link, world_size)` for every configuration asked for; the exit status.

    `report_of` makes a report of those that are known, by name, in the order of `names`.
    """
    if (why := unsupported()) is not None:
        print(why, file=sys.stderr)
        return 2
    exit_on_sigterm()
    measured = {} if parsed.out is None else load_parts(parsed.out / f"{report}.json")
    for name in parsed.only:
        link, world = name.split("/")
        measured[name] = run(link, int(world))
        print(f"{name}: {measured[name]['seconds']:.0f} s", file=sys.stderr, flush=True)
        whole = report_of({name: measured[name] for name in names if name in measured})
        if parsed.out is not None:  # after each, as the whole takes long
            write(whole, parsed.out)
    print_report(Console() if sys.stdout.isatty() else Console(width=width), whole)
    return 1 if whole.wrong else 0
