# SPDX-License-Identifier: BSD-3-Clause
"""The times and the table of `calibrate`, measured on the user's own ranks, for "auto"."""

import importlib.util
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from .._environment import COSTS_VARIABLE
from .._loader import __version__
from .._numbers import in_digits
from ..exchange import MeasuredHost, calibrate, get_communicator
from ..planning.measuring import measure_all
from .usage import (
    UsageError,
    plain_console,
    printable,
    shell_word,
    writing,
)
from .world import World, choose_device, joined_world

# Hosts are said to be unequal from this ratio of their speeds on.
_UNEQUAL = 1.15


def measure(device_name: str, seconds: float, out: Path, timeout: float | None) -> None:
    """Joins the ranks of the launcher, measures and writes `out`."""
    device = choose_device(device_name)
    console = plain_console(width=None if sys.stdout.isatty() else 120)
    os.environ.pop(COSTS_VARIABLE, None)  # an earlier table, which may be why somebody calibrates
    backend = "nccl" if device.type == "cuda" else "gloo"
    with joined_world(backend, timeout) as world:
        if world.size == 1:
            raise UsageError(
                "one process has no exchange to measure; start several: "
                "tree-attention run -n 2 -m tree_attention calibrate"
            )
        run(world, device, seconds, out, console)


def run(world: World, device: torch.device, seconds: float, out: Path, console: Console) -> None:
    """Measures; rank 0 writes `out` and, where matplotlib is installed, a picture next to it."""
    comm = get_communicator()
    bars = Console(stderr=True)
    with Progress(console=bars, transient=True, disable=not world.root) as bar:
        task = bar.add_task("measuring", total=None)
        costs = calibrate(
            comm, device, seconds, lambda n, total: bar.update(task, completed=n, total=total)
        )
        hosts, _ = measure_all("calibrate", comm, device, comm.timeout)
        costs = replace(costs, machines=hosts)
    if world.root:
        remarks = {
            "tree_attention": __version__,
            "torch": torch.__version__,
            "host": platform.node(),
            "device": device.type,
            "topology": str(comm.topology),
        }
        with writing("--out", out):
            costs.save(out, remarks)
        times: dict[str, dict[int, float]] = {}
        for row in costs.exchanges:
            times.setdefault(row.strategy, {})[row.num_bytes] = row.seconds
        console.print(table(times), soft_wrap=False)
        console.print(*map(printable, of_hosts(costs.machines)), sep="\n")
        console.print(f"wrote {printable(out)}; to use it:")
        console.print(f"export {COSTS_VARIABLE}={shell_word(out.resolve())}")
        if importlib.util.find_spec("matplotlib") is None:
            console.print("no picture without matplotlib: pip install matplotlib")
        else:
            picture = out.with_suffix(".png")
            with writing("the picture of --out", picture):
                draw(times, picture)
            console.print(f"drew {printable(picture)}")


def of_hosts(hosts: Sequence[MeasuredHost]) -> list[str]:
    """Lines with the speed of each rank's host, and with what to do where they differ."""
    lines = [
        f"rank {rank} ({host.host}): reads {in_digits(host.read / 1e9)} GB/s of keys and "
        f"{in_digits(host.weights / 1e9)} of weights, {in_digits(host.flop / 1e12)} TFLOP/s, "
        f"{in_digits(1e3 * host.layer)} ms a layer, {in_digits(host.memory / 1e9)} GB free"
        for rank, host in enumerate(hosts)
    ]
    rates = [host.read for host in hosts]
    if max(rates) > _UNEQUAL * min(rates):
        slowest, fastest = rates.index(min(rates)), rates.index(max(rates))
        lines.append(
            f"rank {slowest} reads at {rates[slowest] / rates[fastest]:.0%} of the speed of rank "
            f"{fastest}: with equal parts the others wait for it; see --shares of generate and plan"
        )
    return lines


Times = Mapping[str, Mapping[int, float]]  # seconds by strategy and bytes of a state


def table(times: Times) -> Table:
    sizes = sorted({size for row in times.values() for size in row})
    best = {size: min(row[size] for row in times.values()) for size in sizes}
    title = "Exchanges in us, until the last rank is done; *: what auto takes"
    result = Table("strategy", title=title, title_justify="left", box=None)
    for size in sizes:
        result.add_column(f"{size:,} bytes", justify="right")
    for name, row in times.items():
        marks = {size: "*" * (row[size] == best[size]) for size in sizes}
        result.add_row(name, *(f"{marks[size]}{1e6 * row[size]:,.0f}" for size in sizes))
    return result


def draw(times: Times, path: Path) -> None:
    """Measured times by the size of a state, a line for each strategy."""
    from matplotlib.figure import Figure  # which opens no window, as pyplot would

    figure = Figure(figsize=(7, 4.5))
    axes = figure.subplots()
    for name, row in times.items():
        sizes = sorted(row)
        axes.plot(sizes, [1e6 * row[size] for size in sizes], "o-", label=name)
    axes.set(xscale="log", yscale="log", xlabel="bytes of a state", ylabel="microseconds")
    axes.set_title("exchanges on these ranks")
    axes.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")
