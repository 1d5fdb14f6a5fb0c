# SPDX-License-Identifier: BSD-3-Clause
"""`python -m benchmarks.latent operator` or `model`: latent attention beside other forms."""

import argparse
import sys

from . import model, operator

PROGRAMS = {"operator": operator.main, "model": model.main}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.latent", description=__doc__)
    parser.add_argument("program", choices=PROGRAMS)
    name = parser.parse_args(arguments[:1]).program
    return PROGRAMS[name](arguments[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
