# SPDX-License-Identifier: BSD-3-Clause
"""Published figures and tables beside ours, by arithmetic and simulation.

python -m benchmarks.papers --help                         # lists them
python -m benchmarks.papers lean_figure_7 --out DIR
"""

import argparse
import sys

from ..harness.program import add_out, finish
from . import average, lean, tree

FIGURES = {**tree.FIGURES, **lean.FIGURES, **average.FIGURES}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.papers",
        description=(__doc__ or "").split("\n\n")[0],
        epilog="figures: " + ", ".join(FIGURES),
    )
    parser.add_argument("figures", nargs="+", choices=FIGURES, metavar="FIGURE")
    add_out(parser)
    parsed = parser.parse_args(arguments)
    return max([finish(FIGURES[name](), parsed.out, width=200) for name in parsed.figures])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
