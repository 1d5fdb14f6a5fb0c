# SPDX-License-Identifier: BSD-3-Clause
"""Decoding steps on simulated clusters, and the simulation beside measured ones.

python benchmarks/simulate.py --out DIR                    # the study
python benchmarks/simulate.py --cluster metro --ranks 2 8  # a part of it
python benchmarks/simulate.py --costs FILE --ranks-per-node 8   # what `calibrate` wrote
python benchmarks/simulate.py --validate FILE              # rows of emulation/clusters.py
"""

import argparse
import sys
from pathlib import Path

from rich.console import Console

if (
    __name__ == "__main__"
):  # started by its path: `benchmarks` is found from the root of the checkout
    sys.path[0] = str(Path(__file__).parents[1])

from benchmarks.harness.program import progress_bar
from benchmarks.harness.report import print_report, write
from benchmarks.simulation import (
    CLUSTERS,
    from_costs,
    study,
    validation,
    validation_report,
)
from tree_attention.exchange.costs import Calibration


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--cluster", nargs="+", choices=CLUSTERS, default=list(CLUSTERS))
    parser.add_argument("--ranks", nargs="+", type=int, default=list(study.RANKS), metavar="N")
    parser.add_argument("--costs", type=Path, metavar="FILE", help="instead of named clusters")
    parser.add_argument("--ranks-per-node", type=int, default=1, metavar="N", help="of --costs")
    parser.add_argument(
        "--key-bandwidth", type=float, default=10.0, metavar="GB/S", help="of --costs (default 10)"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="write the report there")
    parser.add_argument(
        "--validate", type=Path, nargs="+", metavar="FILE", help="measured rows (JSON)"
    )
    parser.add_argument(
        "--fit",
        nargs="+",
        default=[],
        metavar="LINK/RANKS",
        help="fit what software takes to these configurations of --validate, predict the others",
    )
    parser.add_argument(
        "--processors", type=int, metavar="N", help="that the ranks of --fit shared"
    )
    parsed = parser.parse_args(arguments)
    if min(parsed.ranks) < 2 or parsed.ranks_per_node < 1:
        parser.error("a world has two ranks or more, a node one or more")
    console = Console() if sys.stdout.isatty() else Console(width=220)
    if parsed.validate is not None:
        return validate(parsed.validate, parsed.fit, parsed.processors, parsed.out, console)
    clusters, names = dict(CLUSTERS), parsed.cluster
    if parsed.costs is not None:
        names = [parsed.costs.stem]
        calibration = Calibration.load(parsed.costs)
        clusters[names[0]] = from_costs(
            names[0],
            calibration.costs,
            parsed.ranks_per_node,
            1e9 * parsed.key_bandwidth,
            "gloo" if calibration.measured is None else calibration.measured.backend,
        )
    with progress_bar(root=True) as progress:
        chosen = study.cases(names, sorted(set(parsed.ranks)))
        headlines, strategies, memory = study.run(chosen, clusters, progress)
    for report in (memory, headlines):
        print_report(console, report)
    if parsed.out is not None:
        paths = [path for r in (headlines, strategies, memory) for path in write(r, parsed.out)]
        console.print("Written: " + ", ".join(map(str, paths)), highlight=False)
    return 1 if strategies.wrong else 0


def validate(
    paths: list[Path], fitted: list[str], processors: int | None, out: Path | None, console: Console
) -> int:
    rows = [row for path in paths for row in validation.read(path)]
    chosen = [row for row in rows if row.configuration in fitted]
    if len({row.configuration for row in chosen}) < len(set(fitted)):
        known = ", ".join(dict.fromkeys(row.configuration for row in rows))
        console.print(f"--fit takes some of the configurations of the rows: {known}", style="red")
        return 2
    software = validation.fit(chosen, processors) if chosen else None
    predictions = [validation.predict(row, software) for row in rows]
    report = validation_report.report_of(predictions, software, fitted)
    print_report(console, report)
    if out is not None:
        paths = write(report, out)
        console.print("Written: " + ", ".join(map(str, paths)), highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
