# SPDX-License-Identifier: BSD-3-Clause
"""LeanAttention's schedule on a CPU beside those of FlashAttention-2 and FlashDecoding.

python -m lab.papers.schedules --out DIR

A thread stands for an SM, and the kernel is the same for all: only who reads which keys differs.
"""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.accuracy import Float64Check
from benchmarks.harness.measure import (
    InputArena,
    Load,
    load_warnings,
    pin_threads,
    time_alternating,
)
from benchmarks.harness.program import finish, parser_of
from benchmarks.harness.report import Report, verdict
from tree_attention import lean_decode, merge_states

from ..simulation.schedule import (
    BEST_SPLIT,
    FLASH_ATTENTION_2,
    FLASH_DECODING,
    LEAN,
    TILES,
    Gpu,
    ratios_to_lean,
    schedules,
    uniform,
)
from .comparison import Row, comparison, number

HEADS, KEYS, HEAD_DIM = (1, 2, 3), 96 << 10, 128  # keys that many numbers of parts divide
OTHERS = {FLASH_ATTENTION_2: "FA-2", FLASH_DECODING: "FD", BEST_SPLIT: "best"}


def in_parts(q: Tensor, k: Tensor, v: Tensor, parts: int) -> tuple[Tensor, Tensor]:
    """Every output in as many equal parts, none of which two workers share, and their merge."""
    k, v = (x[0].unflatten(1, (parts, -1)).transpose(0, 1) for x in (k, v))
    options: dict[str, Any] = {"num_workers": -1, "out_dtype": torch.float32}
    o, lse = lean_decode(q.expand(parts, -1, -1, -1), k, v, **options)
    return merge_states(o[:, None], lse[:, None], out_dtype=q.dtype)


def row_of(heads: int, keys: int, seconds: float) -> Row:
    shape, dtype = (1, heads, keys, HEAD_DIM), torch.bfloat16
    set_bytes = 2 * dtype.itemsize * torch.Size(shape).numel()
    arena = InputArena(set_bytes * InputArena.num_sets(set_bytes))
    sets = [
        (arena.view(2 * i, shape, dtype).normal_(), arena.view(2 * i + 1, shape, dtype).normal_())
        for i in range(InputArena.num_sets(set_bytes))
    ]
    q = torch.randn(1, heads, 1, HEAD_DIM).to(dtype)
    work = uniform(keys, heads, head_dim=HEAD_DIM)
    gpu = Gpu("threads", torch.get_num_threads(), 1.0, resident=1)
    parts = {name: plan.parts for name, plan in schedules(work, gpu).items()}
    functions: dict[str, Callable[[int], Any]] = {
        name: partial(lambda count, i: in_parts(q, *sets[i], count), parts[name]) for name in OTHERS
    }
    functions[FLASH_ATTENTION_2] = lambda i: lean_decode(q, *sets[i], num_workers=-1)
    functions[LEAN] = lambda i: lean_decode(q, *sets[i])
    with Load() as load:
        samples = time_alternating(functions, num_sets=len(sets), seconds=seconds)
    check = Float64Check(q, *sets[0], None)
    right = [check.accuracy(*f(0)).right for f in functions.values()]
    times = {name: sample.median for name, sample in samples.items()}
    return {
        "name": f"{heads} key head{'s' * (heads > 1)}",
        "times": times,
        "ratios": {name: times[name] / times[LEAN] for name in OTHERS},
        "tiles": ratios_to_lean(work, gpu, TILES),
        "parts": parts,
        "other_load": load.others,
        "wrong": not all(right),
    }


def report_of(rows: Sequence[Row], keys: int) -> Report:
    def column(name: str, short: str) -> dict[str, Callable[[Row], str]]:
        return {
            f"/{short}": lambda row: number(row["ratios"][name]),
            f"/{short} by tiles": lambda row: number(row["tiles"][name]),
            f"{short} parts": lambda row: str(row["parts"][name]),
        }

    columns: dict[str, Callable[[Row], str]] = {
        "lean us": lambda row: number(1e6 * row["times"][LEAN], 0)
    }
    for name, short in OTHERS.items():
        columns |= column(name, short)
    report = comparison(
        "lean_schedules",
        f"LeanAttention's schedule on {torch.get_num_threads()} threads of a CPU",
        rows,
        {**columns, "right": verdict},
        (
            f"One query, as many query heads as key heads of {HEAD_DIM}, {keys:,} keys, bfloat16, "
            "cold. Speedups are LeanAttention's: the default schedule of lean_decode. "
            f"{FLASH_ATTENTION_2}: num_workers=-1, a worker for each output. {FLASH_DECODING}: "
            "equal parts by its rule for as many SMs as threads, and merge_states.",
            "By tiles: what equal tiles alone say. A thread alone reads faster than one of two.",
        ),
    )
    report.warnings += load_warnings([row["other_load"] for row in rows])
    return report


def main(arguments: list[str]) -> int:
    parser = parser_of(__doc__, "lean_schedules")
    parser.add_argument("--heads", nargs="+", type=int, default=list(HEADS), metavar="N")
    parser.add_argument("--keys", type=int, default=KEYS, help=f"(default {KEYS})")
    parser.add_argument("--seconds", type=float, default=3.0, help="for each row (default 3)")
    parsed = parser.parse_args(arguments)
    pin_threads()
    with torch.inference_mode():
        rows = [row_of(heads, parsed.keys, parsed.seconds) for heads in parsed.heads]
    return finish(report_of(rows, parsed.keys), parsed.out)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
