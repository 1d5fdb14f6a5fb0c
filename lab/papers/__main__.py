# SPDX-License-Identifier: BSD-3-Clause
"""Published figures and tables beside ours, by arithmetic and simulation.

python -m lab.papers                                # lists them with the paper's numbers
python -m lab.papers lean_figure_7 --out DIR
"""

import argparse
import sys

from benchmarks.harness.program import add_out, finish

from . import average, lean, tree
from .comparison import published_and_ours

FIGURES = {**tree.FIGURES, **lean.FIGURES, **average.FIGURES}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m lab.papers",
        description=(__doc__ or "").split("\n\n")[0],
        epilog="figures: " + ", ".join(FIGURES),
    )
    parser.add_argument("figures", nargs="*", metavar="FIGURE", help="without one: a line of each")
    add_out(parser)
    parsed = parser.parse_args(arguments)
    if unknown := [name for name in parsed.figures if name not in FIGURES]:
        parser.error(f"no figure is called {', '.join(unknown)}; there are {', '.join(FIGURES)}")
    if not parsed.figures:
        for name, make in FIGURES.items():
            print(f"{name}: {published_and_ours(make())}", flush=True)
        return 0
    status = 0
    for name in parsed.figures:
        report = FIGURES[name]()
        print(published_and_ours(report))
        status = max(status, finish(report, parsed.out, width=200))
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
