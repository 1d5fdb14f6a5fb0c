# SPDX-License-Identifier: BSD-3-Clause
"""Sequences that begin with the same pages: `cascade_decode` beside `lean_decode`.

python benchmarks/cascade.py --out DIR
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

# Started by its path: `benchmarks` is found from the root of the checkout.
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])

from benchmarks.harness.accuracy import Float64Check
from benchmarks.harness.measure import Load, load_warnings, pin_threads, time_alternating
from benchmarks.harness.program import add_quick, finish, parser_of, progress_bar, shown
from benchmarks.harness.report import Columns, Report, columns_of, environment, verdict
from tree_attention import cascade_decode, lean_decode, page_groups
from tree_attention.reference import quantise

OURS, ROWS, GROUPS = "cascade", "lean_decode", "groups"
HEADS, HEADS_KV, HEAD_DIM = 32, 8, 128
PAGE_SIZE = 64
OWN_PAGES = 1


@dataclass(frozen=True)
class CascadeCase:
    rows: int
    common: int  # keys
    kv_dtype: str | None = None

    @property
    def name(self) -> str:
        return f"{self.rows} rows, {self.common} keys, {self.kv_dtype or 'bf16'}"


# Where it is arithmetic alone that limits.
MANY_ROWS = tuple(CascadeCase(rows, 32768) for rows in (32, 64))
STANDARD = (
    *(
        CascadeCase(rows, common, kv_dtype)
        for kv_dtype in (None, "int8")
        for common in (512, 2048, 32768)
        for rows in (2, 4, 8, 16)
    ),
    *MANY_ROWS,
)
QUICK = (CascadeCase(2, 128), CascadeCase(5, 1024), CascadeCase(5, 1024, "int8"))


def run_case(case: CascadeCase, seconds: float) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    pages, number = case.common // PAGE_SIZE, case.common // PAGE_SIZE + case.rows * OWN_PAGES
    q = torch.randn(case.rows, HEADS, 1, HEAD_DIM, generator=generator).bfloat16()
    k, v = (
        torch.randn(number, HEADS_KV, PAGE_SIZE, HEAD_DIM, generator=generator).bfloat16()
        for _ in range(2)
    )
    own = torch.arange(pages, number).view(case.rows, OWN_PAGES)
    table = torch.cat((torch.arange(pages).expand(case.rows, -1), own), dim=1).int()
    options: dict[str, Any] = {"page_table": table}
    if case.kv_dtype is not None:
        (k, options["k_scale"]), (v, options["v_scale"]) = (
            quantise(x.float(), torch.int8) for x in (k, v)
        )
    functions: dict[str, Callable[[int], Any]] = {
        OURS: lambda _: cascade_decode(q, k, v, **options),
        ROWS: lambda _: lean_decode(q, k, v, **options),
        GROUPS: lambda _: page_groups(table, [table.shape[1]] * case.rows, PAGE_SIZE),
    }
    with Load() as load:
        samples = time_alternating(functions, num_sets=1, seconds=seconds)
    some = slice(2)  # of the rows, as the reference takes seconds for each
    check = Float64Check(q[some], k, v, None, **options | {"page_table": table[some]})
    accuracy = check.accuracy(*(x[some] for x in samples[OURS].result))
    return {
        "name": case.name,
        "case": asdict(case),
        "times": {name: sample.to_json() for name, sample in samples.items()},
        "ratio": samples[ROWS].median / samples[OURS].median,
        "other_load": load.others,
        "accuracy": asdict(accuracy),
        "wrong": not accuracy.right,
    }


def measure(cases: Sequence[CascadeCase], seconds: float) -> Report:
    cpus = pin_threads()
    with torch.inference_mode(), progress_bar(True) as progress:
        rows = [run_case(case, seconds) for case in shown(progress, cases)]
    return Report(
        name="cascade",
        title="Sequences that begin with the same pages",
        notes=NOTES,
        environment=environment(**{"pinned to CPUs": cpus or "not pinned"}),
        rows=rows,
        columns=columns_of(rows, COLUMNS),
        warnings=load_warnings([row["other_load"] for row in rows]),
    )


def _microseconds(name: str) -> Callable[[dict[str, Any]], str]:
    return lambda row: f"{row['times'][name]['median_us']:.0f}"


NOTES = (
    f"A new token of each row, {HEADS}/{HEADS_KV} heads of {HEAD_DIM}, pages of {PAGE_SIZE} keys, "
    f"of which each row has {OWN_PAGES} for itself; medians of alternating runs through Python. "
    "lean_decode reads the common pages for each row, from the same memory. groups: what looking "
    "for them in the page table takes, which is a part of cascade.",
    "error is relative to the row's largest magnitude, against float64; more than twice that of "
    "plain PyTorch plus one rounding is WRONG.",
)

COLUMNS: Columns = {
    "case": lambda row: row["name"],
    "cascade us": _microseconds(OURS),
    "lean_decode us": _microseconds(ROWS),
    "lean_decode /cascade": lambda row: f"{row['ratio']:.2f}",
    "groups us": _microseconds(GROUPS),
    "error": lambda row: f"{row['accuracy']['o_error']:.1e}",
    "right": verdict,
}


def main(arguments: list[str]) -> int:
    parser = parser_of(__doc__, "cascade")
    add_quick(parser, 1.0)
    parsed = parser.parse_args(arguments)
    return finish(measure(QUICK if parsed.quick else STANDARD, parsed.seconds), parsed.out)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
