# SPDX-License-Identifier: BSD-3-Clause
"""The index arithmetic of LeanAttention's Algorithm 4 at every size up to a bound.

python -m lab.papers.algorithm_4 --out DIR
"""

import sys
from collections import Counter
from collections.abc import Sequence
from itertools import product
from typing import Any

from benchmarks.harness.program import finish, parser_of
from benchmarks.harness.report import Columns, Report, columns_of, environment
from lab.papers.algorithms.lean import (
    SCHEDULES,
    AsPrinted,
    Balanced,
    CorrectedLast,
    outcome,
)

CORRECTED = (CorrectedLast, Balanced)


def row_of(schedule: type[AsPrinted], sizes: Sequence[tuple[int, int, int]]) -> dict[str, Any]:
    counted = Counter(outcome(schedule(*size)) for size in sizes)
    return {
        "name": schedule.__name__,
        "sizes": len(sizes),
        "right": counted["right"],
        "lost": counted["wrong"],
        "hangs": counted["hangs"],
        "wrong": schedule in CORRECTED and counted["right"] != len(sizes),
    }


COLUMNS: Columns = {
    "schedule": lambda row: row["name"],
    "sizes": lambda row: f"{row['sizes']:,}",
    "right": lambda row: f"{row['right']:,}",
    "loses or mixes tiles": lambda row: f"{row['lost']:,}",
    "hangs": lambda row: f"{row['hangs']:,}",
}


def run(outputs: int, iterations: int, ctas: int) -> Report:
    sizes = list(product(range(1, outputs + 1), range(1, iterations + 1), range(1, ctas + 1)))
    rows = [row_of(schedule, sizes) for schedule in SCHEDULES]
    return Report(
        "algorithm_4",
        f"LeanAttention's Algorithm 4 on up to {outputs} output tiles of up to {iterations} "
        f"iterations and {ctas} CTAs",
        [
            "Every CTA runs to its end or waits forever; no order of the CTAs changes which. A "
            "size is right if every output tile gets each of its iterations once and in order.",
            "AsPrinted rounds the share I / G down, AsPrintedRoundedUp up; both take tile_iter_end "
            "/ C_n for the last CTA. LastByShare takes tile_iter_end / I_G, CorrectedLast "
            "(tile_iter_end - 1) / I_G. Balanced has shares that differ by at most one.",
        ],
        environment(),
        rows,
        columns_of(rows, COLUMNS),
    )


def main(arguments: list[str]) -> int:
    parser = parser_of(__doc__, "algorithm_4")
    for name, bound in (("outputs", 7), ("iterations", 24), ("ctas", 12)):
        parser.add_argument(f"--{name}", type=int, default=bound, metavar="N")
    parsed = parser.parse_args(arguments)
    if min(parsed.outputs, parsed.iterations, parsed.ctas) < 1:
        parser.error("--outputs, --iterations and --ctas are at least 1")
    return finish(run(parsed.outputs, parsed.iterations, parsed.ctas), parsed.out)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
