# SPDX-License-Identifier: BSD-3-Clause
"""`decode.py --device cuda`: the operator against the GPU's other kernels and its ceilings."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress

from ..harness.accuracy import Float64Check
from ..harness.measure import InputArena
from ..harness.report import Report, environment, json_text
from . import cases as shapes
from . import libraries, machine, merge, targets, timing
from .cases import OURS, CudaCase
from .inputs import SPARE_BYTES, Inputs, num_sets
from .peers import implementations
from .rows import measured_row
from .tables import NOTES, columns, line, missing

AnyCase = CudaCase | merge.MergeCase
NAME, QUICK_NAME = "decode_cuda", "decode_cuda_quick"


def quick_cases() -> list[AnyCase]:
    return [*shapes.quick_cases(), *merge.CASES]


def standard_cases() -> list[AnyCase]:
    return _with_merges(shapes.standard_cases())


def full_cases() -> list[AnyCase]:
    return _with_merges(shapes.full_cases())


def _with_merges(cases: list[CudaCase]) -> list[AnyCase]:
    """After the quick cases, with which every list begins."""
    first = len(shapes.quick_cases())
    return [*cases[:first], *merge.CASES, *cases[first:]]


def run(
    cases: Sequence[AnyCase],
    progress: Progress,
    *,
    seconds: float,
    budget: float | None = None,
    name: str = NAME,
    out: Path | None = None,
    paths: Sequence[Path] = (),
) -> Report:
    """Times the cases beside the libraries of `paths` too; `seconds` limits the samples of one
    implementation in one case. A case that would begin after `budget` seconds, or does not fit into
    memory, is left out and listed. `name` is the report's. The rows so far are in its JSON file in
    `out` after each of them: a kernel that hangs, and whoever ends it then, leaves what was
    measured before."""
    begin = time.monotonic()
    peers = libraries.load(paths)
    properties = torch.cuda.get_device_properties(0)
    before = machine.environment()
    room = torch.cuda.mem_get_info()[0] - SPARE_BYTES
    skipped = []
    fitting: list[tuple[AnyCase, int]] = []
    for case in cases:
        sets = num_sets(case.read_bytes, properties.L2_cache_size)
        if sets * case.set_bytes <= room:
            fitting.append((case, sets))
        else:
            skipped.append(f"{case.name}: needs {sets * case.set_bytes / 1e9:.0f} GB")
    arena_bytes = max(sets * case.set_bytes for case, sets in fitting) if fitting else 0
    arena = InputArena(max(arena_bytes, machine.CEILING_BYTES), "cuda")
    task = progress.add_task("decode", total=len(fitting))
    rows: list[dict[str, Any]] = []
    with torch.inference_mode():
        ceiling = machine.ceiling(arena)
        for case, sets in fitting:
            progress.update(task, description=case.name)
            if budget is not None and time.monotonic() - begin > budget:
                skipped.append(f"{case.name}: the time was up")
                continue
            try:
                if isinstance(case, CudaCase):
                    rows.append(case_row(case, arena, sets, ceiling, seconds, peers))
                else:
                    rows.append(merge.merge_row(case, arena, sets, ceiling, seconds))
            except torch.OutOfMemoryError:
                skipped.append(f"{case.name}: out of memory")
                torch.cuda.empty_cache()
                continue
            except (RuntimeError, ValueError) as error:
                rows.append(failed_row(case.name, timing.reason(error)))
                try:
                    timing.check_device(case.name)
                except timing.DeviceLost:
                    skipped.append(f"everything after {case.name}: the device is lost")
                    break
            progress.console.print(line(rows[-1]), highlight=False, markup=False)
            if out is not None:
                out.mkdir(parents=True, exist_ok=True)
                (out / f"{name}.json").write_text(json_text({"rows": rows}))
            progress.advance(task)
    found = targets.evaluate(rows)
    return Report(
        name=name,
        title=f"lean_decode on one {properties.name}",
        notes=[*NOTES, *missing(rows)],
        environment=environment(
            **before,
            **{
                "gpu state after": machine.state(),
                "read ceiling": f"{ceiling.read / 1e9:.0f} GB/s",
                "device copy": f"{ceiling.copy / 1e9:.0f} GB/s, read and written",
                "seconds of the run": round(time.monotonic() - begin),
            },
        ),
        rows=rows,
        columns=columns(rows),
        warnings=[f"left out: {text}" for text in skipped],
        summary=[target.text for target in found],
        is_read_back=True,
        more={"targets": [asdict(target) for target in found]},
    )


def case_row(
    case: CudaCase,
    arena: InputArena,
    sets: int,
    ceiling: machine.Ceiling,
    seconds: float,
    peers: Mapping[str, libraries.Maker],
) -> dict[str, Any]:
    inputs = Inputs(case, arena, sets)
    calls, missing = implementations(case, inputs, peers)
    first = inputs.sets[0]
    queries = sorted({*range(0, case.seqlen_q, max(1, case.seqlen_q // 4)), case.seqlen_q - 1})
    truth = Float64Check(
        inputs.q,
        first.k,
        first.v,
        None if inputs.all_keys else inputs.key_ranges,
        queries=queries,
        **inputs.options(0),
    )
    row = measured_row(
        calls,
        missing,
        [kv.span[: case.read_bytes] for kv in inputs.sets],
        judge=truth.accuracy,
        io_bytes=case.io_bytes,
        ceiling=ceiling,
        seconds=seconds,
    )
    return {"name": case.name, "section": case.section, "case": asdict(case), **row}


def failed_row(name: str, why: str) -> dict[str, Any]:
    """A row that has no result of ours is wrong."""
    return {
        "name": name,
        "section": "failed",
        "times": {},
        "eager": {},
        "accuracy": {},
        "unavailable": {OURS: why},
        "wrong": True,
    }
