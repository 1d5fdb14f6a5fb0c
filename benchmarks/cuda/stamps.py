# SPDX-License-Identifier: BSD-3-Clause
"""Where the microseconds of a launch of lean_decode go, by a copy of its kernel whose blocks note
when they pass certain places.

    python -m benchmarks.cuda.stamps --out DIR

The copy is one of those that `python -m benchmarks.cuda.ablations` builds.
"""

import argparse
import statistics
import sys
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from benchmarks import cuda

from ..harness.accuracy import Float64Check
from ..harness.measure import InputArena
from ..harness.program import add_out, finish
from ..harness.report import Report, columns_of, environment
from . import ablations
from .cases import LATENCY, MANY_ROWS, MLA_16, ONE_HEAD, OURS, CudaCase, K

NAME = "stamps_cuda"
CASES = (
    LATENCY,
    CudaCase(lengths=(16 * K,)),
    CudaCase(lengths=(64 * K,)),
    ONE_HEAD,
    MANY_ROWS,
    MLA_16,
)
# Stretches of a block's way, each of which ends at a place of ablations/stamps.h, in their order;
# the first begins at its first place.
BEFORE = ("wait", "cut")
OF_OUTPUT = (
    *("set-up", "requests", "first keys", "loop", "combine", "count", "merge"),
    *("count above", "merge above"),
)
STRETCHES = (*BEFORE, *OF_OUTPUT, "end")
STAMPED_OUTPUTS = 2
ENDS = ("start", *BEFORE, *(OF_OUTPUT * STAMPED_OUTPUTS), "end")
MOST_BLOCKS = 1 << 10
LAUNCHES = 40


def stretches(block: Tensor, cycles_per_us: float) -> dict[str, float]:
    """Microseconds of each stretch of a block's way, of its stamps `[places, 2]`; those of several
    outputs are added."""
    found = dict.fromkeys(STRETCHES, 0.0)
    passed = [place for place in range(len(ENDS)) if block[place, 0] > 0]
    for last, place in pairwise(passed):
        found[ENDS[place]] += (block[place, 0] - block[last, 0]).item() / cycles_per_us
    return found


def summary(launches: Sequence[Tensor]) -> dict[str, Any]:
    """What `launches` of `[blocks, places, 2]` stamps say: medians over launches, of the block that
    ends last, and of all blocks that have keys."""
    ways = [(x[:, -1] - x[:, 0]).sum(0).tolist() for x in launches]  # cycles, nanoseconds
    cycles_per_us = 1e3 * sum(cycles for cycles, _ in ways) / sum(time for _, time in ways)
    last, all_blocks, spans = [], [], []
    for stamps in launches:
        # Nanoseconds may come in steps of a thousand: of equals the one with the most to do.
        ends = torch.stack([stamps[:, -1, 1], (stamps[:, :, 0] > 0).sum(1)], 1).tolist()
        last.append(stretches(stamps[ends.index(max(ends))], cycles_per_us))
        working = stamps[stamps[:, ENDS.index("set-up"), 0] > 0]
        all_blocks += [stretches(block, cycles_per_us) for block in working]
        spans.append((stamps[:, -1, 1].max() - stamps[:, 0, 1].min()).item() / 1e3)

    def medians(blocks: Sequence[dict[str, float]]) -> dict[str, float]:
        return {name: statistics.median(block[name] for block in blocks) for name in STRETCHES}

    return {
        "cycles_per_us": cycles_per_us,
        "launch_us": statistics.median(spans),
        "blocks": len(launches[0]),
        "last": medians(last),
        "median": medians(all_blocks),
    }


def measured_row(case: CudaCase, seconds: float) -> dict[str, Any]:
    from . import timing
    from .inputs import Inputs, num_sets
    from .peers import ours

    sets = num_sets(case.read_bytes, torch.cuda.get_device_properties(0).L2_cache_size)
    inputs = Inputs(case, InputArena(sets * case.set_bytes, "cuda"), sets)
    ranges = None if inputs.all_keys else inputs.key_ranges
    stamps = torch.zeros(MOST_BLOCKS, len(ENDS), 2, dtype=torch.int64, device=inputs.device)
    op = torch.ops.tree_attention_ablations.stamped

    def stamped(i: int) -> tuple[Tensor, Tensor]:
        kv = inputs.sets[i]
        o, lse = op(stamps, inputs.q, kv.k, kv.v, ranges, **inputs.options(i))
        return o, lse

    found = timing.measure({OURS: ours(case, inputs), "stamped": stamped}, sets, seconds)
    if found.failed:
        raise RuntimeError(f"{case.name}: {found.failed}")
    launches = []
    for i in range(LAUNCHES):
        stamped(i % sets)
        torch.cuda.synchronize()
        host = stamps.cpu()
        launches.append(host[host[:, -1, 0] > 0])
    kv, queries = inputs.sets[0], [0, case.seqlen_q - 1]
    check = Float64Check(inputs.q, kv.k, kv.v, ranges, queries=queries, **inputs.options(0))
    right = check.accuracy(*found.measured["stamped"].graph.result[:2]).right
    times = {f"{name}_us": 1e6 * x.graph.median for name, x in found.measured.items()}
    return {"name": case.name, "wrong": not right, **times, **summary(launches)}


def run(seconds: float) -> Report:
    from . import machine
    from .timing import reason

    rows: list[dict[str, Any]] = []
    failed: list[str] = []
    with torch.inference_mode():
        for case in CASES:
            try:
                rows.append(measured_row(case, seconds))
            except (RuntimeError, ValueError) as error:  # the others are worth having
                failed.append(f"{case.name} has no row: {reason(error)}")
    return Report(
        name=NAME,
        title="The way of a block of lean_decode through its kernel",
        notes=NOTES,
        environment=environment(**machine.environment()),
        rows=rows,
        columns=columns_of([(row, which) for row in rows for which in ("last", "median")], COLUMNS),
        warnings=failed,
        is_read_back=True,
    )


NOTES = (
    "us. A row is named dtype, query/kv heads, head_dim (/ that of latent values), batch, keys, "
    "queries. Last: the block that ends last, in the median of launches with a cold L2; median: of "
    "all blocks with keys.",
    "launch: from the first block's start to the last one's end, by the device's timer; ours and "
    "stamped: a call of lean_decode and of the copy with stamps, by graph replays.",
    "wait: for the kernel ahead. cut: the block's range of the line. set-up: to its first output. "
    "requests: copies into all stages. first keys: until they are there. loop: to the last product "
    "of the first warp. combine: of the block's warps, and its store. count: fence, counter, "
    "barriers. merge: of the parts, by the last block to arrive; above: of the second level. With "
    "two outputs of a block these are sums.",
)
COLUMNS: dict[str, Any] = {
    "case": lambda row, which: row["name"],
    "block": lambda row, which: which,
    "ours": lambda row, which: f"{row['lean_decode_us']:.1f}",
    "stamped": lambda row, which: f"{row['stamped_us']:.1f}",
    "launch": lambda row, which: f"{row['launch_us']:.1f}",
    **{
        name: partial(lambda name, row, which: f"{row[which][name]:.2f}", name)
        for name in STRETCHES
    },
}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cuda.stamps",
        description="Times the stretches of a launch of lean_decode by clocks in the kernel.",
    )
    parser.add_argument(
        "--seconds", type=float, default=0.3, help="timed seconds per case (default 0.3)"
    )
    add_out(parser, NAME)
    parsed = parser.parse_args(arguments)
    why = cuda.unavailable()
    if why is None and not ablations.load():
        why = "the stamped kernel is not built: python -m benchmarks.cuda.ablations"
    if why is not None:
        print(f"stamps: {why}")
        return 2
    report = run(parsed.seconds)
    return finish(report, parsed.out) or len(report.warnings)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
