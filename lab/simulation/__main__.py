# SPDX-License-Identifier: BSD-3-Clause
"""Decoding steps on simulated clusters.

python -m lab.simulation --out DIR                    # the study
python -m lab.simulation --cluster metro --ranks 2 8  # a part of it
"""

import argparse
import sys

from benchmarks.harness.program import add_out, finish, progress_bar
from lab.simulation import CLUSTERS, study


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--cluster", nargs="+", choices=CLUSTERS, default=list(CLUSTERS))
    parser.add_argument("--ranks", nargs="+", type=int, default=list(study.RANKS), metavar="N")
    add_out(parser)
    parsed = parser.parse_args(arguments)
    if min(parsed.ranks) < 2:
        parser.error("a world has two ranks or more")
    with progress_bar(root=True) as progress:
        reports = study.run(study.cases(parsed.cluster, sorted(set(parsed.ranks))), progress)
    return max([finish(report, parsed.out, width=220) for report in reports])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
