# SPDX-License-Identifier: BSD-3-Clause
"""Result of a benchmark: a table for the terminal and Markdown, with its environment, and JSON."""

import datetime
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from tree_attention import __version__, _loader
from tree_attention.cli.information import cpu_name

from . import LAUNCHER

ROOT = Path(__file__).parents[2]
MEASURED = ("csrc", "python", "setup.py", "benchmarks")  # what a result depends on


# What stands in a row under each heading.
Columns = Mapping[str, Callable[[dict[str, Any]], str]]


@dataclass
class Column:
    """One column of the tables: its heading (with the unit) and the row's value as text."""

    heading: str
    values: list[str]


def columns_of(lines: Sequence[Any], texts: Mapping[str, Callable[..., str]]) -> list[Column]:
    """Columns from what stands in a line under each heading; a line that is a tuple is unpacked."""
    unpacked = [line if isinstance(line, tuple) else (line,) for line in lines]
    return [Column(heading, [text(*line) for line in unpacked]) for heading, text in texts.items()]


def verdict(row: Mapping[str, Any]) -> str:
    """The last column of most tables."""
    return "WRONG" if row["wrong"] else "yes"


@dataclass
class Report:
    """Result of a benchmark; `rows` are plain JSON values, `columns` what people read."""

    name: str
    title: str
    notes: Sequence[str]  # what is inside the timed region, formulas, conditions
    environment: dict[str, Any]
    rows: list[dict[str, Any]]
    columns: list[Column]
    warnings: list[str] = field(default_factory=list)
    summary: list[str] = field(default_factory=list)
    more: dict[str, Any] = field(default_factory=dict)  # further entries of the JSON file
    is_read_back: bool = False  # a program goes on from NAME.json, or compares with it

    @property
    def wrong(self) -> list[str]:
        """Names of the rows whose result was wrong."""
        return [row["name"] for row in self.rows if row["wrong"]]


def environment(**more: Any) -> dict[str, Any]:
    """Everything needed to read a number later: code, versions, machine, command."""
    return {
        "command": shlex.join([*_launchers(), *_command()]),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": commit(),
        "tree_attention": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "compiler": _loader.load().build_info()["compiler"],
        "cpu": cpu_name(),
        "instruction set": _loader.load().cpu_instruction_set(),
        "threads": torch.get_num_threads(),
        **more,
    }


def commit() -> str:
    """The checkout's commit, marked when measured files differ."""
    try:
        head = _git("rev-parse", "--short=10", "HEAD")
        changed = _git("status", "--porcelain", "--untracked-files=no", "--", *MEASURED)
    except (OSError, subprocess.CalledProcessError):
        return "not a checkout"
    return f"{head} with uncommitted changes" if changed else head


def print_report(console: Console, report: Report) -> None:
    table = Table(title=report.title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    name, *others = report.columns
    table.add_column(name.heading)
    for column in others:
        table.add_column(column.heading.replace(" ", "\n", 1), justify="right", no_wrap=True)
    for values in zip(*(column.values for column in report.columns), strict=True):
        table.add_row(*values, style="bold red" if "WRONG" in values else "")
    console.print(table, soft_wrap=False)
    for note in report.notes:
        console.print(note, style="dim", soft_wrap=False)
    for warning in report.warnings:
        console.print(f"Warning: {warning}", style="yellow")
    for sentence in report.summary:
        console.print(sentence, soft_wrap=False)


def write(report: Report, directory: Path) -> list[Path]:
    """Write NAME.md, and where a program reads it back NAME.json; return their paths."""
    directory.mkdir(parents=True, exist_ok=True)
    page, data = (directory / f"{report.name}{suffix}" for suffix in (".md", ".json"))
    page.write_text(markdown(report))
    if not report.is_read_back:
        return [page]
    content = {
        "environment": report.environment,
        "warnings": report.warnings,
        "notes": list(report.notes),
        **report.more,
        "rows": report.rows,
    }
    data.write_text(json_text(content))
    return [page, data]


def json_text(content: Mapping[str, Any]) -> str:
    """JSON with a line for each row: for each element of the lists and objects of `content`."""
    entries = []
    for key, value in content.items():
        if isinstance(value, list) and value:
            text = "[\n" + ",\n".join(map(json.dumps, value)) + "\n]"
        elif isinstance(value, dict) and value:
            lines = (f"{json.dumps(name)}: {json.dumps(item)}" for name, item in value.items())
            text = "{\n" + ",\n".join(lines) + "\n}"
        else:
            text = json.dumps(value)
        entries.append(f"{json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(entries) + "\n}\n"


def markdown(report: Report) -> str:
    lines = [f"# {report.title}", "", "```"]
    lines += [f"{name}: {value}" for name, value in report.environment.items()]
    lines += ["```", ""]
    lines += ["| " + " | ".join(column.heading for column in report.columns) + " |"]
    lines += ["|" + "|".join([" --- "] + [" ---: "] * (len(report.columns) - 1)) + "|"]
    for values in zip(*(column.values for column in report.columns), strict=True):
        lines += ["| " + " | ".join(value.replace("|", "\\|") for value in values) + " |"]
    lines += [""] + [f"- {note}" for note in report.notes]
    lines += [f"- **Warning:** {warning}" for warning in report.warnings]
    lines += [f"- {sentence}" for sentence in report.summary]
    return "\n".join(lines) + "\n"


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def _launchers() -> list[str]:
    """Return what stands before the program: an emulated cluster, torchrun or Python."""
    ranks = os.environ.get("LOCAL_WORLD_SIZE") if "TORCHELASTIC_RUN_ID" in os.environ else None
    last = ["torchrun", "--nproc-per-node", ranks] if ranks else ["python"]
    return [*shlex.split(os.environ.get(LAUNCHER, "")), *last]


def _command() -> list[str]:
    """Return what a user would type in the checkout, without places of this machine."""
    program = Path(sys.argv[0]).absolute()
    shown = program.relative_to(ROOT) if program.is_relative_to(ROOT) else Path(program.name)
    module = getattr(sys.modules["__main__"], "__spec__", None)  # as -m has found it
    started = ["-m", module.name.removesuffix(".__main__")] if module else [str(shown)]
    return [*started, *("DIR" if Path(x).is_absolute() else x for x in sys.argv[1:])]
