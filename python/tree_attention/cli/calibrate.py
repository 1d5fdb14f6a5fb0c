# SPDX-License-Identifier: BSD-3-Clause
"""`python -m tree_attention calibrate`: what exchanges cost on these machines, for "auto"."""

import argparse
import platform
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from .._version import __version__
from ..exchange import Communicator, strategies
from ..exchange.calibration import Sample, calibrate
from ..exchange.costs import COSTS_VARIABLE, Calibration, Costs, default_costs
from .world import World, joined_world


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tree_attention calibrate",
        description="Times exchanges between the ranks of torchrun and their operations, fits the "
        "cost model of strategy 'auto' to them and writes constants and times to a file. Every "
        f"rank of a job that is to use them needs {COSTS_VARIABLE}=FILE in its environment.",
    )
    parser.add_argument("--out", type=Path, default=Path("exchange_costs.json"), metavar="FILE")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: over NCCL")
    parser.add_argument(
        "--seconds", type=float, default=0.4, help="for each operation and size (default 0.4)"
    )
    parsed = parser.parse_args(arguments)
    console = Console() if sys.stdout.isatty() else Console(width=120)
    with joined_world("nccl" if parsed.device == "cuda" else "gloo") as world:
        if world.size == 1:
            console.print("calibrate: there is nothing to measure alone; start it by torchrun")
            return 2
        device = torch.device("cpu")
        if parsed.device == "cuda":
            device = torch.device("cuda", world.local_rank)
            torch.cuda.set_device(device)
        run(world, device, parsed.seconds, parsed.out, console)
        return 0


def run(
    world: World, device: torch.device, seconds: float, out: Path, console: Console
) -> Calibration:
    """Measures and fits; rank 0 writes `out` and a picture beside it."""
    # Not those of an earlier file, which may be why somebody calibrates.
    comm = Communicator(costs=default_costs(dist.get_backend()))
    with Progress(console=console, transient=True, disable=not world.root) as bar:
        task = bar.add_task("measuring", total=None)

        def progress(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        calibration, samples = calibrate(comm, device, seconds, progress)
    costs = calibration.costs
    if world.root:
        calibration.save(
            out,
            measured_on={
                "tree_attention": __version__,
                "torch": torch.__version__,
                "host": platform.node(),
                "device": device.type,
                "ranks": world.size,
                "topology": str(comm.topology),
            },
            samples=[asdict(s) | {"predicted": costs.seconds(s.work)} for s in samples],
        )
        picture = out.with_suffix(".png")
        draw(samples, costs, picture)
        exchanges = [sample for sample in samples if sample.operation in strategies()]
        console.print(table(exchanges, costs))
        errors = [abs(costs.seconds(s.work) / s.seconds - 1) for s in exchanges]
        console.print(f"{comm.topology}; median error of the model {np.median(errors):.0%}")
        console.print(f"wrote {out} and {picture}; to use it: export {COSTS_VARIABLE}={out}")
    return calibration


def table(samples: list[Sample], costs: Costs) -> Table:
    result = Table(title="Exchanges, until the last rank is done", title_justify="left", box=None)
    for heading in ("strategy", "bytes of a state", "measured us", "model us"):
        result.add_column(heading, justify="left" if heading == "strategy" else "right")
    for sample in samples:
        times = (f"{1e6 * t:,.0f}" for t in (sample.seconds, costs.seconds(sample.work)))
        result.add_row(sample.operation, f"{sample.num_bytes:,}", *times)
    return result


def draw(samples: list[Sample], costs: Costs, path: Path) -> None:
    """Measured times as points and the fitted model as lines, by message size."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    operations = dict.fromkeys(s.operation for s in samples if s.operation not in strategies())
    for name in operations:
        of_this = [sample for sample in samples if sample.operation == name]
        sizes = [sample.num_bytes for sample in of_this]
        (points,) = axes.plot(sizes, [1e6 * s.seconds for s in of_this], "o", label=name)
        predicted = [1e6 * costs.seconds(sample.work) for sample in of_this]
        axes.plot(sizes, predicted, color=points.get_color())
    axes.set(xscale="log", yscale="log", xlabel="bytes of a message", ylabel="microseconds")
    axes.set_title("operations: measured (points), model (lines)")
    axes.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")
    pyplot.close(figure)
