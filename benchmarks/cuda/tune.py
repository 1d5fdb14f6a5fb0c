# SPDX-License-Identifier: BSD-3-Clause
"""Effect of the size of a tile, the stages of the ring and the number of workers on the time of
lean_decode on a GPU.

    python -m benchmarks.cuda.tune --out DIR

The tiles are those that `python -m benchmarks.cuda.ablations` builds.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import cuda
from tree_attention.reference.accuracy import Accuracy

from ..harness.accuracy import Float64Check
from ..harness.measure import InputArena, Load, load_warnings
from ..harness.program import add_out, finish, progress_bar
from ..harness.report import Report, columns_of, environment, json_text
from ..harness.shapes import log_uniform_lengths
from . import ablations, machine
from .cases import CudaCase, K

NAME, DEFAULT = "tune_cuda", "lean_decode"
WORKERS = (0.25, 0.5, 1, 2, 4)  # blocks of each multiprocessor; two are resident
# LeanAttention's tile by head_dim (arXiv:2405.10480, section IV-B), in keys.
PAPERS_TILE = {64: 256, 128: 128}
# In an order that makes a part of them worth having.
SHAPES: tuple[dict[str, Any], ...] = (
    {"lengths": (K,)},
    {"lengths": (64 * K,)},
    {"lengths": (64 * K,), "head_dim": 64},
    {"lengths": (8 * K,)},
    {"lengths": log_uniform_lengths(8, 512, 32 * K)},
    {"lengths": (8 * K,), "heads": (8, 1)},
    {"lengths": (4 * K,) * 8, "page_size": 16},
    {"lengths": (K,), "head_dim": 64},
    {"lengths": (8 * K,), "head_dim": 64},
    {"lengths": (128 * K,), "heads": (8, 1)},
    {"lengths": (128 * K,)},
    {"lengths": (128 * K,), "head_dim": 64},
)
QUICK: tuple[dict[str, Any], ...] = (
    {"lengths": (700,), "heads": (4, 2), "head_dim": 64},
    {"lengths": (300, 70), "heads": (4, 2), "page_size": 16},
)


@dataclass(frozen=True)
class Variant:
    """Zero, which is the default, is what lean_decode chooses."""

    tile: int = 0  # keys
    workers: int = 0
    stages: int = 0  # of the ring

    @property
    def name(self) -> str:
        parts = [f"{self.tile} keys"] if self.tile else []
        parts += [f"{self.stages} stages"] if self.stages else []
        parts += [f"{self.workers} workers"] if self.workers else []
        return ", ".join(parts) or DEFAULT


class Sweep:
    """The device, and memory for the keys and values of every case."""

    def __init__(self, cases: Sequence[CudaCase]) -> None:
        from .inputs import num_sets

        self._device = torch.cuda.get_device_properties(0)
        self._sets = {case: num_sets(case.read_bytes, self._device.L2_cache_size) for case in cases}
        self._arena = InputArena(max(n * case.set_bytes for case, n in self._sets.items()), "cuda")

    def own(self, head_dim: int) -> Variant:
        """The variant that lean_decode chooses, which shows the noise: 16 KB of keys of 16 bits,
        in as many stages as two blocks have room for (plan.cu)."""
        stages = 3 if self._device.shared_memory_per_multiprocessor >= 228 << 10 else 2
        return Variant(8192 // head_dim, stages=stages)

    def variants(self) -> list[Variant]:
        workers = [int(n * self._device.multi_processor_count) for n in WORKERS]
        tiles = [Variant(keys, stages=stages) for keys, stages in ablations.TILES]
        return [Variant(), *tiles, *(Variant(workers=n) for n in workers)]

    def problem(self, case: CudaCase) -> Problem:
        return Problem(case, self._arena, self._sets[case])


class Problem:
    """A case with its tensors."""

    def __init__(self, case: CudaCase, arena: InputArena, num_sets: int) -> None:
        from . import read_probe
        from .inputs import Inputs

        self._inputs = Inputs(case, arena, num_sets)
        self._ranges = None if self._inputs.all_keys else self._inputs.key_ranges
        candidates = read_probe.candidates([kv.span[: case.read_bytes] for kv in self._inputs.sets])
        # Each reads `case.read_bytes`, as fast as the device can.
        self.probes = {f"read probe {shape}": call for shape, call in candidates.items()}

    def call(self, variant: Variant, i: int) -> tuple[Tensor, Tensor]:
        """Attend to the set of keys and values with the number `i`."""
        op, kv = ablations.operator(variant.tile, variant.stages), self._inputs.sets[i]
        options = self._inputs.options(i)
        return op(self._inputs.q, kv.k, kv.v, self._ranges, num_workers=variant.workers, **options)

    def time(self, calls: Mapping[str, Callable[[int], Any]], seconds: float) -> Any:
        """Samples, and reasons of what cannot run, of calls that take turns for so long."""
        from . import timing

        # The first call of a round is not looked at: what follows a probe finds less of its code in
        # the caches. And with it the functions are not two, which would each read only one of two
        # sets.
        calls = {"first": partial(self.call, Variant()), **calls}
        found = timing.measure(calls, len(self._inputs.sets), seconds / len(calls))
        return {name: x.graph for name, x in found.measured.items()}, found.failed

    def accuracy(self, o: Tensor, lse: Tensor) -> Accuracy:
        kv, options = self._inputs.sets[0], self._inputs.options(0)
        return Float64Check(self._inputs.q, kv.k, kv.v, self._ranges, **options).accuracy(o, lse)


def measured_row(case: CudaCase, sweep: Sweep, seconds: float) -> dict[str, Any]:
    problem, own = sweep.problem(case), sweep.own(case.head_dim)
    variants = {v.name: v for v in sweep.variants()}
    calls = {name: partial(problem.call, v) for name, v in variants.items()}
    with Load() as load:
        samples, failed = problem.time(calls, seconds)
        if DEFAULT not in samples:
            raise RuntimeError(f"{case.name}: lean_decode: {failed[DEFAULT]}")
        ours = samples[DEFAULT].median
        ratios = {name: samples[name].median / ours for name in calls if name in samples}
        best = min(ratios, key=lambda name: ratios[name])
        # The least of many medians is too small by chance.
        again, _ = problem.time({name: calls[name] for name in (DEFAULT, best)}, seconds / 2)
        read, _ = problem.time({DEFAULT: calls[DEFAULT], **problem.probes}, seconds / 4)
    accuracies = {name: problem.accuracy(*samples[name].result[:2]) for name in ratios}
    fastest_probe = min(read[name].median for name in problem.probes if name in read)

    def of(chosen: Callable[[Variant], bool]) -> list[float]:
        return [ratio for name, ratio in ratios.items() if chosen(variants[name])]

    return {
        "name": case.name,
        "times": {name: samples[name].to_json() for name in ratios},
        "failed": failed,
        "ratios": ratios,
        "read_share": case.io_bytes / read[DEFAULT].median / (case.read_bytes / fastest_probe),
        "same": ratios[own.name],
        "tiles": of(lambda v: v.tile > 0 and v.workers == 0),
        "workers": of(lambda v: v.tile in (0, own.tile) and v.stages in (0, own.stages)),
        "papers_tile": min(of(lambda v: v.tile == PAPERS_TILE[case.head_dim] and not v.workers)),
        "best": best,
        "best_again": again[best].median / again[DEFAULT].median,
        "other_load": load.others,
        "o_error": max(accuracy.o_error for accuracy in accuracies.values()),
        "wrong": [name for name, accuracy in accuracies.items() if not accuracy.right],
        "variants": {name: asdict(variants[name]) for name in ratios},
    }


def run(
    cases: Sequence[CudaCase], seconds: float, budget: float | None, out: Path | None
) -> Report:
    """`seconds` is the timed part of each case, without the best variant and the probe, which take
    half and a quarter as long. A case that would begin after `budget` seconds is left out and
    listed. The rows so far are in the JSON file in `out` after each of them: a kernel that hangs
    leaves what was measured before."""
    begin, rows, skipped, sweep = time.monotonic(), [], [], Sweep(cases)
    with torch.inference_mode(), progress_bar(True) as progress:
        task = progress.add_task("tune", total=len(cases))
        for case in cases:
            progress.update(task, description=case.name)
            if budget is not None and time.monotonic() - begin > budget:
                skipped.append(f"left out, the time was up: {case.name}")
                continue
            rows.append(measured_row(case, sweep, seconds))
            if out is not None:
                out.mkdir(parents=True, exist_ok=True)
                (out / f"{NAME}.json").write_text(json_text({"rows": rows}))
            progress.advance(task)
    least = min(rows, key=lambda row: row["best_again"])
    return Report(
        name=NAME,
        title="Tiles, stages and workers of lean_decode on a GPU",
        notes=NOTES,
        environment=environment(**machine.environment()),
        rows=rows,
        columns=columns_of(rows, COLUMNS),
        warnings=[*load_warnings([row["other_load"] for row in rows]), *skipped],
        summary=[
            f"The most that a variant saves is {100 * max(0, 1 - least['best_again']):.1f} %: "
            f"{least['best']}, {least['name']}."
        ],
    )


NOTES = (
    "A row is named dtype, query/kv heads, head_dim, batch, keys. Times are medians of calls that "
    "take turns in one run; all other figures are times over that of lean_decode, which chooses "
    "for itself.",
    "% BW is the share of a probe that only reads the same memory, in turn with lean_decode. Same: "
    "lean_decode's own choice, timed once more, which shows the noise. Tiles: the least and the "
    "most over the sizes of a tile; workers: over the numbers of workers. Paper's tile: 256 keys "
    "for a head_dim of 64, 128 for 128. Best: the variant with the least time; again: its time "
    "when only these two take turns.",
    "error is the largest of o over all variants, relative to the row's largest magnitude, against "
    "float64; more than twice that of plain PyTorch plus one rounding is WRONG.",
)


def _range(ratios: Sequence[float]) -> str:
    return f"{min(ratios):.2f}-{max(ratios):.2f}"


COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "case": lambda row: row["name"],
    "ours us": lambda row: f"{row['times'][DEFAULT]['median_us']:,.1f}",
    "% BW": lambda row: f"{100 * row['read_share']:.0f}",
    "same": lambda row: f"{row['same']:.3f}",
    "tiles": lambda row: _range(row["tiles"]),
    "paper's tile": lambda row: f"{row['papers_tile']:.3f}",
    "workers": lambda row: _range(row["workers"]),
    "best": lambda row: row["best"],
    "best /ours": lambda row: f"{row['ratios'][row['best']]:.3f}",
    "again": lambda row: f"{row['best_again']:.3f}",
    "error": lambda row: f"{row['o_error']:.1e}",
    "right": lambda row: "WRONG" if row["wrong"] else "yes",
}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cuda.tune",
        description="Times tiles, stages and numbers of workers beside lean_decode's own choice.",
    )
    parser.add_argument("--quick", action="store_true", help="two tiny cases, to try it")
    parser.add_argument(
        "--seconds", type=float, default=6.0, help="timed seconds per case (default 6)"
    )
    parser.add_argument("--budget", type=float, help="begin no case after so many seconds")
    add_out(parser, NAME)
    parsed = parser.parse_args(arguments)
    why = cuda.unavailable()
    if why is None and not ablations.load():
        why = "the tiles are not built: python -m benchmarks.cuda.ablations"
    if why is not None:
        print(f"tune: {why}")
        return 2
    cases = [CudaCase(**shape) for shape in (QUICK if parsed.quick else SHAPES)]
    return finish(run(cases, parsed.seconds, parsed.budget, parsed.out), parsed.out)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
