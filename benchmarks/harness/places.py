# SPDX-License-Identifier: BSD-3-Clause
"""Measurements at several places, each with so many ranks: one run after the other, and one report
that keeps the rows of earlier runs."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .measure import load_warnings
from .program import add_out, finish
from .report import Report, environment, write

BARE = "bare"  # this machine itself, in the place of a link between emulated hosts


def load_parts(path: Path) -> dict[str, Any]:
    """Return measurements of earlier runs by configuration; none where there is no file."""
    if not path.exists():
        return {}
    content = json.loads(path.read_text())
    parts = {name: {**part, "rows": []} for name, part in content["configurations"].items()}
    for row in content["rows"]:
        parts[f"{row['link']}/{row['world_size']}"]["rows"].append(row)
    return parts


def report_of_places(measured: dict[str, Any], **content: Any) -> Report:
    """A report of configurations, which keeps what it needs to be made again.

    `content` are further arguments of `Report`; `environment` adds to it.
    """
    header = {"configurations": ", ".join(measured), **content.pop("environment", {})}
    parts = {
        name: {key: value for key, value in part.items() if key != "rows"}
        for name, part in measured.items()
    }
    return Report(
        **content,
        environment=environment(**header),
        warnings=load_warnings([part["other_load"] for part in measured.values()]),
        more={"configurations": parts},
        is_read_back=True,
    )


def places_parser(program: str, report: str, names: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"python -m {program}")
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="PLACE/RANKS")
    add_out(parser, report)
    return parser


def measure(
    report: str,
    names: Sequence[str],
    parsed: argparse.Namespace,
    run: Callable[[str, int], dict[str, Any]],
    report_of: Callable[[dict[str, Any]], Report],
    width: int = 180,
) -> int:
    """Call `run(place, world_size)` for every configuration asked for; return the exit status.

    `report_of` makes a report of those that are known, by name, in the order of `names`.
    """
    measured = {} if parsed.out is None else load_parts(parsed.out / f"{report}.json")
    for name in parsed.only:
        place, world = name.split("/")
        measured[name] = run(place, int(world))
        print(f"{name}: {measured[name]['seconds']:.0f} s", file=sys.stderr, flush=True)
        whole = report_of({name: measured[name] for name in names if name in measured})
        if parsed.out is not None:  # after each, as the whole takes long
            write(whole, parsed.out)
    return finish(whole, None, width)


def milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:,.2f}"


def link_sentences(measured: dict[str, Any]) -> list[str]:
    """Describe the measured links of each configuration, median and spread."""
    sentences = []
    for name, part in measured.items():
        for link in part["links"]:
            rtt, rate = link["round_trip_ms"], link["gbit_per_second"]
            sentences.append(
                f"{name}, link {link['link']}: round trip {rtt[1]:.3f} ms ({rtt[0]:.3f} to "
                f"{rtt[2]:.3f}), one bulk transfer {rate[1]:.2f} Gb/s ({rate[0]:.2f} to "
                f"{rate[2]:.2f})"
            )
    return sentences
