# SPDX-License-Identifier: BSD-3-Clause
"""Decoding over ranks: `torchrun --nproc-per-node 2 benchmarks/bench_tree.py --out DIR`."""

import sys

from tree_attention.cli import bench

if __name__ == "__main__":
    sys.exit(bench.main(["tree", *sys.argv[1:]]))
