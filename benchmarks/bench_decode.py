# SPDX-License-Identifier: BSD-3-Clause
"""The local operator beside PyTorch: `python benchmarks/bench_decode.py --full --out DIR`."""

import sys

from tree_attention.cli import bench

if __name__ == "__main__":
    sys.exit(bench.main(["decode", *sys.argv[1:]]))
